"""What this process starts, as it starts it: every collective, and the number of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import distributed

# torch's operators by the names of torch.distributed.
_NAMES = {
    "allreduce_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "gather_": "gather",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
}


class Recorded(NamedTuple):
    op: str
    bytes: int  # of the whole payload: what is reduced or broadcast, what a gather puts together, or what this rank
    # hands over in an all-to-all
    ranks: int


class CollectiveRecorder(TorchDispatchMode):
    """Notes the collectives of this thread while it is on (on CPUs backward runs in the thread that called it)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__
            ranks = next(
                dist.ProcessGroup.unbox(a).size()
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in a._type().qualified_name()
            )
            # Gathers, scatters and all-to-alls name their outputs first, reductions and broadcasts their payload.
            leaves = tree_leaves(args[1] if "scatter" in name or "alltoall" in name else args[0])
            size = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
            self.calls.append(Recorded(_NAMES.get(name, name), 0 if name == "barrier" else size, ranks))
        return function(*args, **(kwargs or {}))

    def take(self) -> list[Recorded]:
        """What was noted since the last call."""
        calls, self.calls = self.calls, []
        return calls


class KernelCounter(TorchDispatchMode):
    """Counts the operators that do work: on a GPU each launches a kernel or a few, on the CPU it shows how many."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view and function.namespace == "aten"
        return function(*args, **(kwargs or {}))


def with_all_to_all_totals(calls: Sequence[Recorded]) -> list[Recorded]:
    """With what all ranks together hand over in each all-to-all; call it on all ranks, which made the same ones."""
    own = [call.bytes for call in calls if call.op == "all_to_all"]
    totals = iter(distributed.sum_over_ranks(torch.tensor(own, dtype=torch.int64)).tolist() if own else [])
    return [call._replace(bytes=next(totals)) if call.op == "all_to_all" else call for call in calls]


def count_calls(calls: Sequence[Recorded]) -> Counter[tuple[str, int]]:
    """How many there are of each (operation, payload bytes)."""
    return Counter((call.op, call.bytes) for call in calls if call.bytes)


class Use(NamedTuple):
    """A module begins (`fetch`) or ends, forward or backward; `members` are its own parameters' places in the model."""

    module: int
    members: tuple[int, ...]
    fetch: bool


class OrderRecorder:
    """In which order gradients come and, under ZeRO-3, modules run, on a built run: `take` after every micro-step."""

    def __init__(self, model_engine: Any) -> None:
        self.order: list[int] = []
        self.uses: list[Use] = []
        parameters = list(model_engine.module.parameters())
        places = {id(p): i for i, p in enumerate(parameters)}
        for i, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_hook(lambda _, i=i: self.order.append(i))
        offload = getattr(model_engine.optimizer, "parameter_offload", None)
        if offload is None:
            return
        coordinator = offload.get_param_coordinator()
        for name, fetch in (("fetch_sub_module", True), ("release_sub_module", False)):
            setattr(coordinator, name, self._spy(getattr(coordinator, name), places, fetch=fetch))

    def _spy(self, original: Any, places: dict[int, int], *, fetch: bool) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            members = tuple(sorted(places[id(p)] for p in module.parameters(recurse=False)))
            self.uses.append(Use(module.ds_id, members, fetch))
            return original(module, *args, **kwargs)

        return call

    def take(self) -> tuple[list[int], list[Use]]:
        seen, self.order, self.uses = (self.order, self.uses), [], []
        return seen
