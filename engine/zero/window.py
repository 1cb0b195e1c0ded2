"""AGVM's window before the engine's step, and AGVM's state in the engine's checkpoints.

`Attachment` wraps these methods of DeepSpeed's engine: `optimizer.step` (once per optimizer step, at every stage),
`allreduce_gradients` (at the end of each backward; AGVM acts before and after it), `clip_fp32_gradients` (only at
stage 0 in fp32, which clips before the step), `save_checkpoint` and `load_checkpoint`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.capture import Capture
from engine.zero.layout import layout_of
from engine.zero.patching import Wrapped
from engine.zero.processes import new_group
from engine.zero.slices import Piece, Slice, Slices, gradient_square, slice_limit, whole_fragments
from engine.zero.support import check_micro_batches, check_own_engine, note_version, refuse_unsupported

logger = logging.getLogger(__name__)

CLIENT_STATE_KEY = "agvm"  # of AGVM's state in DeepSpeed's client_state; `engine.checkpoints` uses it too


class Attachment:
    """Connects a DeepSpeed engine with a client optimizer (`AGVMOptimizer`).

    The client has a `modulator` (is_window, update, discard). `client.companion` says what to capture, `client.sums`
    turns a slice of gradient, companion and state into three sums. In a window the extra memory is one partition and
    two buckets at most.
    """

    def __init__(self, engine: Any, client: Any, *, bucket_size: int) -> None:
        import deepspeed

        check_own_engine(engine, client, name="optimizer", attached=client._attachment is not None)
        if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
            raise ValueError(f"bucket_size must be a whole number >= 1 of elements, got {bucket_size!r}")
        refuse_unsupported(engine, "AGVM")
        self.engine, self.client, self.version = engine, client, deepspeed.__version__
        self.layout = layout_of(engine)
        accumulation = engine.gradient_accumulation_steps()
        check_micro_batches(self.layout.world, accumulation)
        note_version(self.version)
        # A separate process group: its collectives run in parallel with DeepSpeed's and never wait for them.
        members = dist.get_process_group_ranks(engine.seq_data_parallel_group or dist.group.WORLD)
        group = new_group(members) if self.layout.world > 1 else None
        self.capture = Capture(
            self.layout,
            group,
            kind=client.companion,
            accumulation=accumulation,
            bucket_size=bucket_size,
            device=torch.device(engine.device),
            dtype=engine.communication_data_type,
            in_window=self._in_window,
        )
        self.modules = list(client.modulator.mu)
        self._slices: tuple[Any, str, Slices] | None = None
        self.groups = [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in client.param_groups]
        self.wrapped = Wrapped()
        self.wrapped.put(engine.optimizer, "step", self._step)
        self.wrapped.put(engine, "allreduce_gradients", self._allreduce_gradients)
        if hasattr(engine, "coalesce_grad_reduction"):
            self.wrapped.put(engine, "coalesce_grad_reduction", _refuse_coalescing)
        self.layout.watch_clipping(self.wrapped, self._in_window)
        self.wrapped.put(engine, "save_checkpoint", self._save_checkpoint)
        self.wrapped.put(engine, "load_checkpoint", self._load_checkpoint)
        client._attachment = self

    def detach(self) -> None:
        """Restore the engine's own methods."""
        self.wrapped.undo()
        self.capture.remove()
        self.client._attachment = None

    def _in_window(self) -> bool:
        return self.client.modulator.is_window(self.engine.global_steps + 1)

    def _allreduce_gradients(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self.capture.end_micro_step()
        result = original(*args, **kwargs)
        self.capture.after_reduction()
        return result

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._in_window():
            self._measure(self.engine.global_steps + 1)
        self.capture.agree_on_order()
        return original(*args, **kwargs)

    @torch.no_grad()
    def _measure(self, step: int) -> None:
        """Finish the reduction, sum over this rank's partition, all-reduce three numbers per module, update mu."""
        layout, capture, modulator = self.layout, self.capture, self.client.modulator
        layout.settle()
        square = torch.zeros((), dtype=torch.float64, device=capture.device)
        if layout.needs_norm:
            square += gradient_square(self.slices)
        captured = capture.finish(square)
        if captured.reason is not None:
            if self.layout.rank == 0:
                logger.warning("AGVM could not use the window of step %d: %s", step, captured.reason)
            modulator.discard(captured.reason)
        else:
            if capture.check is not None:
                self._check(captured.fired, capture.check.partition)
            sums = self._sums(captured.fired, captured.norm)
            modulator.update(
                step, {name: sums[k].tolist() for k, name in enumerate(self.modules)}, capture.halves.total
            )
        capture.close()

    @property
    def slices(self) -> Slices:
        """This rank's partition in flat slices; of one side each, where buckets take turns in what they hold."""
        plan, kind = self.capture.plan, self.capture.kind
        if self._slices is None or self._slices[0] is not plan or self._slices[1] != kind:
            pieces = whole_fragments(self.layout)
            if kind == "signed" and len(self.capture.halves.senders) == 2:
                fragments = self.layout.fragments
                pieces = [
                    Piece(fragments[k], start, stop, plan.homes[k] + start, side=b % 2)
                    for b, bucket in enumerate(plan.buckets)
                    for k, start, stop, _ in bucket.spans
                ]
            # Much smaller than the two buckets, which are free again by then.
            limit = slice_limit(self.capture.device, self.capture.bucket_size // 8)
            self._slices = plan, kind, Slices(self.layout, pieces, limit)
        return self._slices[2]

    def _sums(self, fired: list[bool], norm: float) -> Tensor:
        capture, client = self.capture, self.client
        scale, companion_scale = self.layout.factors(norm)
        sums = torch.zeros(len(self.modules), 3, dtype=torch.float64, device=capture.device)
        for part in self.slices.with_gradient(client.state, fired):
            group = client.param_groups[part.group]
            g = _scaled(part.gradient(), scale)
            own = client.sums(group, part.state(client.state), g, self._companion(part, g, companion_scale))
            sums[self.modules.index(group["module"])] += own.to(sums.device)
        if capture.norms is not None:
            factor = companion_scale**2 * capture.K / self.layout.world
            for i, square in enumerate(capture.norms.tolist()):
                module = client.param_groups[self.layout.group[i]]["module"]
                sums[self.modules.index(module), 1:] += square * factor
        return capture.all_reduce(sums).cpu()

    def _companion(self, part: Slice, g: Tensor, scale: float) -> Tensor | None:
        """The companion of a slice, in the units of g (of g^2, if squared) and on its device: with an offloaded
        optimizer, g and the state are on the CPU."""
        capture = self.capture
        if capture.share is not None:
            of_share, of_gradient = capture.halves.coefficients(part.side)
            return (g * of_gradient).add_(part.of(capture.share).to(g), alpha=of_share * scale)
        if capture.squares is not None:
            return _scaled(part.of(capture.squares.partition).to(g.device), scale**2)
        return None

    def _check(self, fired: list[bool], captured: Tensor) -> None:
        """First window: what the hooks saw must equal DeepSpeed's own gradients, or the layout was read wrongly.

        For two halves the hooks give the second one twice the weight: 2 g - s, so that a wrong share shows too.
        """
        capture, clipped = self.capture, self.layout.clipped_by
        sums = torch.zeros(len(self.client.param_groups), 2, dtype=torch.float64, device=capture.device)
        for part in self.slices.with_gradient({}, fired):
            theirs = part.gradient().double()
            if capture.share is not None:
                share = part.of(capture.share).to(theirs) * clipped
                theirs = (theirs if part.side else 2 * theirs) - share
            error = theirs - part.of(captured).to(theirs) * clipped
            sums[part.group] += torch.stack([error.square().sum(), theirs.square().sum()]).to(sums.device)
        sums = capture.all_reduce(sums).cpu()
        if not torch.isfinite(sums).all():
            return  # an overflow: check again in the next window
        tolerance = 1e-3 if capture.dtype == torch.float32 else 0.1
        for group, (error, total) in zip(self.client.param_groups, sums.tolist()):
            if error > tolerance**2 * total:
                raise RuntimeError(
                    f"the gradient captured for module {group['module']!r} differs from DeepSpeed {self.version}'s by "
                    f"{(error / total) ** 0.5 if total else float('inf'):.2g} of its norm: this version lays out its "
                    "shards in another way than engine/zero/layout.py reads them, or some ranks got no gradient for a "
                    "parameter; use deepspeed 0.19.x"
                )
        capture.checking = False

    def _save_checkpoint(
        self, original: Callable, save_dir: str, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # For the user's own training loop. `engine.checkpoints` passes the same entry itself, and restores it itself.
        state = {CLIENT_STATE_KEY: self.client.agvm_state_dict(), **(client_state or {})}
        return original(save_dir, tag, state, *args, **kwargs)

    def _load_checkpoint(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        path, client_state = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        if path is None or given.arguments["load_module_only"] or not given.arguments["load_optimizer_states"]:
            return path, client_state
        # DeepSpeed 0.19.8's universal ZeRO-3 load gives every param group the keys of group 0.
        schedule = self.client.param_groups[0]["lr"] / (self.groups[0]["lr"] or 1.0)
        for group, own in zip(self.client.param_groups, self.groups):
            if self.engine.load_universal_checkpoint():
                group.update(own, lr=own["lr"] * schedule)
            group["module"] = own["module"]
        if client_state and CLIENT_STATE_KEY in client_state:
            self.client.load_agvm_state_dict(client_state[CLIENT_STATE_KEY])
        return path, client_state


def _refuse_coalescing(original: Callable, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "AGVM does not support engine.coalesce_grad_reduction(), which reduces several backward passes as one: call "
        "engine.backward without it, or use another optimizer"
    )


def _scaled(x: Tensor, factor: float) -> Tensor:
    """In fp32."""
    return x.float() if factor == 1.0 else x.float() * factor
