"""Give every trainable parameter a gradient in every micro-step, in the same order on every rank.

DeepSpeed 0.19.8 fills its buckets in the order in which gradients arrive, and assumes the same order on all ranks. A
parameter without a gradient on *some* ranks (a head that saw no object) mixes up the buckets of ZeRO-1/2 or hangs
ZeRO-3. One without a gradient on *any* rank counts as zero at stages 0, 1 and 2, and is
updated with the previous step's gradient at stage 3. Here a missing gradient is zero at every stage.

Before backward the ranks compare which parameters their graphs reach. This is the only message of a micro-step that is
not a gradient or a weight, and reading it is the only time that the host waits for the device: it travels on the
accelerator's own backend, and what else the ranks must tell each other travels with it (`extra`).
- If every rank reaches every parameter, nothing is done.
- If a parameter is missing for the first time, the gradients of this micro-step are computed first and then delivered
  in parameter order, with zeros for the missing ones. This holds one full set of gradients, for this micro-step only.
- A parameter that was missing before is a known gap: an autograd node created before the forward pass touches it.
  Backward runs nodes in reverse order of creation, so its zeros come after all other gradients, on all ranks.

The other two ways to a hang at ZeRO-3: `whole_parameters.py` and `module_trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from engine import distributed


def reached_parameters(loss: torch.Tensor) -> set[int]:
    """Ids of the leaf tensors that the graph of `loss` leads to."""
    reached: set[int] = set()
    seen: set[Any] = set()
    stack = [loss.grad_fn] if loss.grad_fn is not None else []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return reached


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    shape = getattr(parameter, "ds_shape", parameter.shape)  # a partitioned parameter is itself empty
    return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)


def _gather(parameters: Sequence[Any], in_flight: dict) -> list[Any]:
    """Under ZeRO-3, gather parameters (autograd needs their full shape) and return those that were partitioned."""
    partitioned = [p for p in parameters if hasattr(p, "ds_id") and p.ds_status.name != "AVAILABLE"]
    for parameter in partitioned:
        if parameter in in_flight:  # prefetched for a backward pass that may never use it
            in_flight.pop(parameter).wait()
    missing = [p for p in partitioned if p.ds_status.name == "NOT_AVAILABLE"]
    if missing:
        missing[0].all_gather(missing)
    return partitioned


def _release(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
            parameter.partition()


class _Touch(torch.autograd.Function):
    """A zero that depends on parameters; their gradients are zeros, created in backward."""

    @staticmethod
    def forward(ctx: Any, gather: Callable, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gather, ctx.parameters = gather, parameters
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        ctx.gather(ctx.parameters)
        return None, *(_zeros(parameter) for parameter in ctx.parameters)


class Observer(Protocol):
    """Whoever has hooks on the parameters (AGVM). Hooks fire where gradients are computed and again where they are
    delivered, so the gradients are handed over in between, once."""

    def ignoring(self) -> AbstractContextManager[None]: ...

    def listen(self) -> None: ...

    def take_all(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    def learn_order(self) -> None: ...


class _Deliver(torch.autograd.Function):
    """The loss; its backward computes the gradients of an inner graph and returns them in parameter order."""

    @staticmethod
    def forward(
        ctx: Any,
        gather: Callable,
        inner: Callable[[], torch.Tensor],
        counts: bool,
        observer: Observer | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gather, ctx.inner, ctx.counts, ctx.observer, ctx.parameters = gather, inner, counts, observer, parameters
        return inner().detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        gradients: Iterable[torch.Tensor | None] = [None] * len(ctx.parameters)
        # Under ZeRO-3 a rank whose loss does not count runs backward too: the others wait for it in every module.
        if ctx.inner().requires_grad and (ctx.counts or hasattr(ctx.parameters[0], "ds_id")):
            with nullcontext() if ctx.observer is None else ctx.observer.ignoring():
                computed = torch.autograd.grad(ctx.inner(), ctx.parameters, grad, allow_unused=True)
            gradients = computed if ctx.counts else gradients
        ctx.gather(ctx.parameters)
        complete = [g if g is not None else _zeros(p) for g, p in zip(gradients, ctx.parameters)]
        if ctx.observer is not None:
            ctx.observer.take_all(zip(ctx.parameters, complete))
        return None, None, None, None, *complete


class Agreed(NamedTuple):
    loss: torch.Tensor
    broken: int  # ranks whose micro-batch does not count
    counts: bool  # whether that of this rank does
    extra: list[float]  # the caller's numbers, summed over ranks


class CompleteGradients:
    """On all ranks: `touch()` before the forward pass, `complete(loss, ...)` after it, `release()` after backward.

    Set `observer` to whoever has hooks on the parameters.
    """

    observer: Observer | None = None

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._model = model
        self._known_gaps: list[int] = []
        self._gathered: list[torch.nn.Parameter] = []
        self._flags: tuple[tuple[bool, ...], torch.Tensor] | None = None

    def _on_device(self, there: tuple[bool, ...], device: torch.device) -> torch.Tensor:
        # They rarely change, so that they are rarely copied.
        if self._flags is None or self._flags[0] != there or self._flags[1].device != device:
            self._flags = there, torch.tensor(there, dtype=torch.float32).to(device)
        return self._flags[1]

    def _gather(self, parameters: Sequence[Any]) -> list[Any]:
        # DeepSpeed keeps the parameters it is fetching on the root module (0.19.8).
        return _gather(parameters, getattr(self._model, "ds_inflight_param_registry", {}))

    def _gather_for_backward(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._gathered.extend(self._gather(parameters))

    def touch(self) -> torch.Tensor | None:
        if self.observer is not None:
            self.observer.listen()
        gaps = [self.parameters[i] for i in self._known_gaps if self.parameters[i].requires_grad]
        if not gaps:
            return None
        partitioned = self._gather(gaps)
        touched = _Touch.apply(self._gather_for_backward, *gaps)
        _release(partitioned)
        return touched

    def complete(
        self,
        loss: torch.Tensor,
        touched: torch.Tensor | None,
        *,
        counts: bool | torch.Tensor = True,
        extra: torch.Tensor | None = None,
    ) -> Agreed:
        """The loss to call backward on, and what the ranks told each other.

        A micro-batch that does not count (its loss is not finite) contributes zeros instead of gradients. `counts` may
        be a tensor on the device, so that the host need not wait for it. `extra` is a vector of the caller's, as long
        on all ranks, which is summed over ranks in the same message.
        """
        if touched is not None:  # on all ranks, because under ZeRO-3 its backward gathers
            loss = loss + touched.to(loss.dtype)
        reached = reached_parameters(loss)
        # A parameter that was frozen meanwhile needs no gradient.
        there = tuple(id(p) in reached or not p.requires_grad for p in self.parameters)
        own = (
            counts.detach().float() if isinstance(counts, torch.Tensor) else torch.full((), counts, device=loss.device)
        )
        parts = [1.0 - own.float().view(1), self._on_device(there, loss.device) * own]
        message = torch.cat(parts if extra is None else [*parts, extra.float()])
        broken, *sums = distributed.sum_on_device(message).tolist()
        flags, told = sums[: len(there)], sums[len(there) :]
        world = distributed.world_size()
        gaps = [i for i, n in enumerate(flags) if n < world and self.parameters[i].requires_grad]
        mine = not broken or bool(own)
        if not gaps:
            return Agreed(loss, int(broken), mine, told)
        if not broken:
            self._known_gaps = sorted({*self._known_gaps, *gaps})
            if self.observer is not None:
                self.observer.learn_order()
        trained = [p for p in self.parameters if p.requires_grad]
        partitioned = self._gather([self.parameters[i] for i in gaps])
        delivered = _Deliver.apply(self._gather_for_backward, lambda: loss, mine, self.observer, *trained)
        _release(partitioned)
        return Agreed(delivered, int(broken), mine, told)

    def release(self) -> None:
        """Under ZeRO-3, partition again what backward gathered."""
        _release(self._gathered)
        self._gathered.clear()
