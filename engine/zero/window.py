"""AGVM's window before the engine's step, and AGVM's state in the engine's checkpoints.

`Attachment` wraps these methods of DeepSpeed's engine: `optimizer.step` (once per optimizer step, at every stage),
`allreduce_gradients` (at the end of each backward, before anything is reduced), `clip_fp32_gradients` (only at stage 0
in fp32, which clips before the step), `save_checkpoint` and `load_checkpoint`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.capture import Capture
from engine.zero.companion import Lane
from engine.zero.geometry import Fragment
from engine.zero.layout import layout_of, squared_norm, state_slice
from engine.zero.patching import Wrapped
from engine.zero.support import check_micro_batches, check_own_engine, note_version, refuse_unsupported

CLIENT_STATE_KEY = "agvm"  # of AGVM's state in DeepSpeed's client_state; `engine.checkpoints` uses it too


class Attachment:
    """Connects a DeepSpeed engine with a client optimizer (`AGVMOptimizer`).

    The client has a `modulator` (is_window, update, discard). `client.companion` says what to capture, `client.sums`
    turns a slice of gradient, companion and state into three sums.
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
        group = dist.new_group(members) if self.layout.world > 1 else None
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
        self.groups = [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in client.param_groups]
        self.wrapped = Wrapped()
        self.wrapped.put(engine.optimizer, "step", self._step)
        self.wrapped.put(engine, "allreduce_gradients", self._allreduce_gradients)
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
        return original(*args, **kwargs)

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._in_window():
            self._measure(self.engine.global_steps + 1)
        self.capture.agree_on_order()
        return original(*args, **kwargs)

    @torch.no_grad()
    def _measure(self, step: int) -> None:
        """Finish the reduction, sum over this rank's partition, all-reduce three numbers per module, update mu."""
        layout, capture, modulator = self.layout, self.capture, self.client.modulator
        square = torch.zeros((), dtype=torch.float64, device=capture.device)
        for fragment in layout.fragments if layout.needs_norm else ():
            g = layout.gradient(fragment)
            if g is not None:
                square += squared_norm(g).to(capture.device)
        fired, norm, reason = capture.finish(square)
        if reason is not None:
            modulator.discard(reason)
        else:
            if capture.plain is not None:
                self._check(fired)
            sums = self._sums(fired, norm)
            modulator.update(step, {name: sums[k].tolist() for k, name in enumerate(self.modules)}, capture.R)
        capture.close()

    def _sums(self, fired: list[bool], norm: float) -> Tensor:
        scale, companion_scale = self.layout.factors(norm)
        if self.client.companion != "signed":
            companion_scale = companion_scale**2
        sums = torch.zeros(len(self.modules), 3, dtype=torch.float64, device=self.capture.device)
        for fragment, low, high, g, d in self._slices(fired, self.capture.lane):
            group = self.client.param_groups[self.layout.group[fragment.param]]
            # On the device of g: with an offloaded optimizer, g and the state are on the CPU.
            d = None if d is None else _scaled(d.to(g.device), companion_scale)
            part = self.client.sums(group, self._state(fragment, low, high), _scaled(g, scale), d)
            sums[self.modules.index(group["module"])] += part.to(sums.device)
        if self.capture.norms is not None:
            for i, square in enumerate(self.capture.norms.tolist()):
                module = self.client.param_groups[self.layout.group[i]]["module"]
                sums[self.modules.index(module), 1:] += square * companion_scale * self.capture.K / self.layout.world
        return self.capture.all_reduce(sums).cpu()

    def _slices(self, fired: list[bool], lane: Lane | None) -> Iterator[tuple[Fragment, int, int, Tensor, Any]]:
        """Small slices of this rank's fragments: g and the companion.

        Parameters without gradient are left out: ZeRO-3 (and an offloaded ZeRO-1/2) still holds the previous step's.
        """
        # Much smaller than the two buckets, which are free again by now. Sums are fp32 in a slice and fp64 over slices.
        largest = 1 << 16 if self.capture.device.type == "cpu" else 1 << 22
        limit = max(1024, min(self.capture.bucket_size // 16, largest))
        for k, start, stop, home in self.capture.plan.spans:
            fragment = self.layout.fragments[k]
            g = self.layout.gradient(fragment) if fired[fragment.param] else None
            if g is not None:
                for low in range(start, stop, limit):
                    high = min(stop, low + limit)
                    d = None if lane is None else lane.partition[home + low - start : home + high - start]
                    yield fragment, low, high, g[low:high], d

    def _state(self, fragment: Fragment, low: int, high: int) -> dict[str, Any]:
        shard, begin = self.layout.shard(fragment), fragment.offset
        return state_slice(self.client.state.get(shard, {}), shard, begin + low, begin + high)

    def _check(self, fired: list[bool]) -> None:
        """First window: the plain companion must equal DeepSpeed's own gradient, or the layout was read wrongly."""
        capture = self.capture
        sums = torch.zeros(len(self.client.param_groups), 2, dtype=torch.float64, device=capture.device)
        for fragment, _, _, theirs, mine in self._slices(fired, capture.plain):
            theirs = theirs.double()
            error = theirs - mine.to(theirs.device).double() * self.layout.clipped_by
            part = torch.stack([error.square().sum(), theirs.square().sum()])
            sums[self.layout.group[fragment.param]] += part.to(sums.device)
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
        capture.checking, capture.plain = False, None

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


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x.float() if factor == 1.0 else x.float() * factor
