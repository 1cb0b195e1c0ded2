"""Where DeepSpeed keeps the shards of every parameter: one class per DeepSpeed wrapper, with one interface.

For each range that this rank owns (a fragment of `geometry`), a layout gives the reduced gradient that DeepSpeed has
ready before the optimizer step, and the tensor that is the key of the optimizer state. `layout_of`, at the end, chooses
the class. Read off DeepSpeed 0.19.8; if a later version differs, the check in AGVM's first window (`window.py`) or at
the start of LARS and LAMB (`layer_norms.py`) stops the run. Checkpoints store the class names: do not rename them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.geometry import Chunks, Fragment, Geometry, Partitions, Replicas
from engine.zero.loss_scale import restore_scale, saved_scale
from engine.zero.patching import Wrapped


def squared_norm(x: Tensor) -> Tensor:
    """|x|^2 in fp64, slice by slice: torch would make a copy of the whole tensor. A GPU adds pairwise, in fp32."""
    # Flattened in memory order, which makes no copy (the gradient of a linear layer comes transposed).
    flat = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)
    if x.device.type != "cpu":
        return torch.stack([part.float().square().sum() for part in flat.split(1 << 22)]).double().sum()
    slices = (part.double() for part in flat.split(1 << 14))
    return torch.stack([torch.dot(part, part) for part in slices]).sum()


class Layout:
    """The interface. `params` and `group` (the param group index of each parameter) are the same on every rank."""

    # Whether local gradients accumulate until the last micro-step, where DeepSpeed reduces them once.
    keeps_local = False
    # Whether `gradient` is None for a parameter that got none; DeepSpeed's wrappers hold zeros or an older gradient.
    may_lack_gradient = False
    # Whether a parameter's first gradient after the first micro-step is added to that of the step before (0.19.8).
    adds_to_stale = False

    def __init__(self, engine: Any, params: list[Tensor], group: list[int]) -> None:
        self.engine, self.wrapper, self.params, self.group = engine, engine.optimizer, params, group
        self.world = dist.get_world_size(engine.seq_data_parallel_group)
        self.rank = dist.get_rank(engine.seq_data_parallel_group)
        self.geometry = self._geometry([getattr(p, "ds_numel", p.numel()) for p in params])
        self.fragments = self.geometry.fragments

    def _geometry(self, numels: list[int]) -> Geometry:
        raise NotImplementedError

    def shard(self, fragment: Fragment) -> Tensor:
        """The master weights of the fragment's shard: the key of its optimizer state."""
        raise NotImplementedError

    def held(self) -> list[Fragment]:
        """The ranges whose master weights and optimizer state this rank keeps."""
        return self.geometry.held()

    def shards(self) -> dict[int, Tensor]:
        """The shards of `held`, by number."""
        return {fragment.shard: self.shard(fragment) for fragment in self.held()}

    def publish(self) -> None:
        """Copy changed master weights into the model's parameters, on all ranks."""
        self.wrapper.update_lp_params()

    def scaler(self) -> Any:
        """The object that holds the loss scale (cur_scale, cur_iter, ...), or None."""
        return getattr(self.wrapper, "loss_scaler", None)

    def gradient(self, fragment: Fragment) -> Tensor | None:
        """The reduced gradient of the fragment, flat, as DeepSpeed holds it: still scaled and not clipped."""
        raise NotImplementedError

    def local_sum(self, i: int) -> Tensor | None:
        """The gradient that this rank has accumulated so far (only if `keeps_local`)."""
        return self.params[i].grad

    def reduced_so_far(self, fragment: Fragment) -> Tensor:
        """The reduced gradient of the micro-steps so far, flat, after one that is not the last (unless `keeps_local`).

        It belongs to DeepSpeed, which goes on adding to it: copy it.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until gradients on their way to the host are there. Call it before reading gradients."""

    @property
    def needs_norm(self) -> bool:
        """Whether `factors` depends on |g|."""
        return self.wrapper.clip_grad > 0

    def factors(self, norm: float) -> tuple[float, float]:
        """The factors that turn g, and the companion, into what the optimizer step sees; `norm` is |g|."""
        scale, clip = self.loss_scale(), self.wrapper.clip_grad
        if clip > 0:
            scale *= max(1.0, (norm / scale + 1e-6) / clip)
        return 1 / scale, 1 / scale

    def loss_scale(self) -> float:
        return float(self.wrapper.loss_scale)

    # The factor of clipping before the optimizer step: at stage 0 in fp32 only; DeepSpeed's wrappers clip in the step.
    clipped_by = 1.0

    def watch_clipping(self, wrapped: Wrapped, in_window: Callable[[], bool]) -> None:
        """Keep `clipped_by` up to date in windows."""

    def step_with(self, update: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
        """A step of DeepSpeed's wrapper in which `update` replaces the optimizer's own step.

        So gradients are unscaled, weights gathered and gradients cleared as in any step. The loss scale is kept.
        """
        scaler, wrapped = self.scaler(), Wrapped()
        scale = saved_scale(scaler)
        wrapped.put(optimizer, "step", lambda original, closure=None: update())
        try:
            type(self.wrapper).step(self.wrapper)  # the method of the class: AGVM and LAMB wrap that of the instance
        finally:
            wrapped.undo()
        self.wrapper.zero_grad()
        if not self.wrapper.overflow:
            restore_scale(scaler, scale)  # this was no optimizer step, so it must not count as one
        if hasattr(self.wrapper, "_hp_optimizer_states_linked"):
            self.wrapper._hp_optimizer_states_linked = False  # BF16_Optimizer (0.19.8): there is no state to link yet


class Replicated(Layout):
    """Stage 0: every rank holds everything. For AGVM's sums each rank takes 1/N of every parameter."""

    keeps_local = may_lack_gradient = True
    needs_norm = False

    def __init__(self, engine: Any) -> None:
        groups = [
            [p for p in group["params"] if p.requires_grad and p.numel()] for group in engine.optimizer.param_groups
        ]
        super().__init__(
            engine, [p for group in groups for p in group], [k for k, group in enumerate(groups) for _ in group]
        )
        self.masters = self.params

    def _geometry(self, numels: list[int]) -> Geometry:
        return Replicas(numels, self.world, self.rank)

    def shard(self, fragment: Fragment) -> Tensor:
        return self.masters[fragment.param]

    def publish(self) -> None:
        pass  # the master weights are the parameters

    def gradient(self, fragment: Fragment) -> Tensor | None:
        grad = self.params[fragment.param].grad
        return None if grad is None else grad.reshape(-1)[fragment.start : fragment.stop]

    def factors(self, norm: float) -> tuple[float, float]:
        return 1.0, self.clipped_by

    def watch_clipping(self, wrapped: Wrapped, in_window: Callable[[], bool]) -> None:
        def clip(original: Callable[[], None]) -> None:
            # All gradients are multiplied by one factor, so it can be read off the first that is not zero.
            norms = ((p.grad, float(squared_norm(p.grad)) ** 0.5) for p in self.params if p.grad is not None)
            sample, before = (
                next(((g, norm) for g, norm in norms if norm > 0), (None, 1.0)) if in_window() else (None, 1.0)
            )
            original()
            self.clipped_by = 1.0 if sample is None else float(squared_norm(sample)) ** 0.5 / before

        wrapped.put(self.engine, "clip_fp32_gradients", clip)

    def step_with(self, update: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
        update()  # there is no wrapper, and the optimizer works on the model's own weights
        self.engine.zero_grad()


class ReplicatedMasters(Replicated):
    """Stage 0 in bf16 (FP16_UnfusedOptimizer): one fp32 master per bf16 parameter."""

    needs_norm = Layout.needs_norm
    factors = Layout.factors
    watch_clipping = Layout.watch_clipping
    step_with = Layout.step_with

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        Layout.__init__(
            self,
            engine,
            [p for group in wrapper.fp16_groups for p in group],
            [k for k, group in enumerate(wrapper.fp16_groups) for _ in group],
        )
        self.masters = [p for group in wrapper.fp32_groups for p in group]

    def publish(self) -> None:
        for parameter, master in zip(self.params, self.masters):
            parameter.data.copy_(master.data)

    def scaler(self) -> Any:
        return self.wrapper.loss_scale_config

    def loss_scale(self) -> float:
        return float(self.wrapper.loss_scale_config.cur_scale)


class Flat(Layout):
    """Base of ZeRO-1 and 2: a param group is one flat tensor, padded and cut into N contiguous partitions."""

    def __init__(self, engine: Any, groups: list[list[Tensor]], offsets: list[list[int]], sizes: list[int]) -> None:
        self._sizes = [int(size) for size in sizes]
        self._positions = [int(offset) for group in offsets for offset in group]
        super().__init__(
            engine, [p for group in groups for p in group], [k for k, group in enumerate(groups) for _ in group]
        )

    def _geometry(self, numels: list[int]) -> Geometry:
        return Partitions(
            numels, self.world, self.rank, groups=self.group, positions=self._positions, sizes=self._sizes
        )


class ZeroOneTwo(Flat):
    """ZeRO-1 and ZeRO-2 (DeepSpeedZeroOptimizer)."""

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        self.keeps_local = not wrapper.partition_gradients
        self.adds_to_stale = bool(wrapper.cpu_offload)
        # The round-robin lists are right with and without round_robin_gradients; `_hp_mapping` is not (0.19.8).
        super().__init__(
            engine, wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets, wrapper.partition_size
        )
        order = sorted(self.fragments, key=lambda f: (f.shard, f.offset))
        first = {f.shard: k for k, f in reversed(list(enumerate(order)))}
        self.ordinal = {f: k - first[f.shard] for k, f in enumerate(order)}

    def shard(self, fragment: Fragment) -> Tensor:
        return self.wrapper.single_partition_of_fp32_groups[fragment.shard]

    def gradient(self, fragment: Fragment) -> Tensor | None:
        begin, end = fragment.offset, fragment.offset + fragment.stop - fragment.start
        if self.wrapper.cpu_offload:
            return _offloaded_gradient(self.shard(fragment), begin, end)
        parts = self.wrapper.averaged_gradients[fragment.shard]
        flat = getattr(parts, "flat_partition", None)
        if flat is not None:
            return flat.view(-1)[begin:end]
        # Otherwise a list of one tensor per fragment, in partition order; parameter_alignment puts padding in between.
        if self.wrapper.parameter_alignment:
            parts = [p for p in parts if not getattr(p, "_zero_padding", False)]
        return parts[self.ordinal[fragment]].reshape(-1)[: end - begin]

    def reduced_so_far(self, fragment: Fragment) -> Tensor:
        wrapper, length = self.wrapper, fragment.stop - fragment.start
        # Sums in fp32 of 16-bit gradients: flat, on the accelerator even with an offloaded optimizer.
        flat = getattr(wrapper.averaged_gradients.get(fragment.shard), "flat_partition", None)
        if flat is not None:
            return flat.view(-1)[fragment.offset : fragment.offset + length]
        if wrapper.cpu_offload:
            held = wrapper.accumulated_grads_in_cpu.get(wrapper.get_param_id(self.params[fragment.param]))
            if held is None:  # no gradient so far
                return torch.zeros(length, dtype=wrapper.dtype)
            # With 16-bit master weights only this rank's range is held.
            held = held.view(-1)
            return held[:length] if held.numel() == length else held[fragment.start : fragment.stop]
        # Whole parameters, which are reduced only in the range that this rank owns.
        group = wrapper.all_grad_tensors.get(fragment.shard)
        if group is None:  # sums in fp32, and no gradient of this group so far
            return torch.zeros(length, dtype=wrapper.gradient_accumulation_dtype, device=self.engine.device)
        held = group[self.ordinal[fragment]]
        return held.reshape(-1)[fragment.start : fragment.stop]

    def settle(self) -> None:
        # At ZeRO-1/2, DeepSpeed 0.19.8 copies gradients to pinned memory without blocking and waits in its own step.
        self.wrapper._wait_for_offload_copies()

    def local_sum(self, i: int) -> Tensor | None:
        return self.wrapper.get_gradient_for_reduction(self.params[i])


class BF16(Flat):
    """ZeRO-1 in bf16 with fp32 accumulation (BF16_Optimizer)."""

    keeps_local = True

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        self.row = [(k, j) for k, group in enumerate(wrapper.bf16_groups) for j in range(len(group))]
        super().__init__(
            engine,
            wrapper.bf16_groups,
            [[0, *accumulate(p.numel() for p in group[:-1])] for group in wrapper.bf16_groups],
            [partition.numel() for partition in wrapper.fp32_groups_flat_partition],
        )

    def shard(self, fragment: Fragment) -> Tensor:
        return self.wrapper.fp32_groups_flat_partition[fragment.shard]

    def gradient(self, fragment: Fragment) -> Tensor | None:
        flat = self.wrapper.fp32_groups_gradient_flat_partition[fragment.shard]
        return flat[fragment.offset : fragment.offset + fragment.stop - fragment.start]

    def local_sum(self, i: int) -> Tensor | None:
        k, j = self.row[i]
        return self.wrapper.fp32_groups_gradients[k][j] if self.wrapper.fp32_groups_has_gradients[k][j] else None

    def loss_scale(self) -> float:
        return 1.0


class Chunked(Layout):
    """ZeRO-3 (DeepSpeedZeroOptimizer_Stage3): every parameter in N chunks; a sub-group joins the chunks of a rank."""

    adds_to_stale = True

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        self.row = [(k, j) for k, group in enumerate(wrapper.fp16_groups) for j in range(len(group))]
        self.position = [wrapper.grad_position[wrapper.get_param_id(p)] for group in wrapper.fp16_groups for p in group]
        self._starts = [0, *accumulate(sum(p.partition_numel() for p in group) for group in wrapper.fp16_groups)]
        super().__init__(
            engine,
            [p for group in wrapper.fp16_groups for p in group],
            [wrapper.sub_group_to_group_id[k] for k, _ in self.row],
        )

    def _geometry(self, numels: list[int]) -> Geometry:
        homes = [(int(sub_group), int(offset)) for sub_group, offset, _ in self.position]
        return Chunks(numels, self.world, self.rank, homes)

    def shard(self, fragment: Fragment) -> Tensor:
        return self.wrapper.fp32_partitioned_groups_flat[fragment.shard]

    def publish(self) -> None:
        for k in range(len(self.wrapper.fp32_partitioned_groups_flat)):
            self.wrapper._reassign_or_swap_out_partitioned_parameters(k)
        persistent = self.wrapper.persistent_parameters
        if persistent:  # kept on every rank: gather them again from the new partitions
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def gradient(self, fragment: Fragment) -> Tensor | None:
        length = fragment.stop - fragment.start
        if self.wrapper.offload_optimizer:
            return _offloaded_gradient(self.shard(fragment), fragment.offset, fragment.offset + length)
        k, j = self.row[fragment.param]
        return self.wrapper.averaged_gradients[k][j].view(-1)[:length]

    def reduced_so_far(self, fragment: Fragment) -> Tensor:
        # The chunks of all parameters lie end to end in one buffer, in the order of the sub-groups.
        start = self._starts[fragment.shard] + fragment.offset
        return self.wrapper.grad_partitions_flat_buffer[start : start + fragment.stop - fragment.start]

    def settle(self) -> None:
        # With an offloaded optimizer, DeepSpeed 0.19.8 copies gradients to the host without blocking.
        if self.wrapper.offload_optimizer and torch.device(self.engine.device).type != "cpu":
            from deepspeed.accelerator import get_accelerator  # importing DeepSpeed takes seconds

            get_accelerator().synchronize()


def _offloaded_gradient(shard: Tensor, start: int, stop: int) -> Tensor:
    assert shard.grad is not None  # with an offloaded optimizer DeepSpeed puts the gradient on the shard
    return shard.grad.view(-1)[start:stop]


def layout_of(engine: Any) -> Layout:
    """The layout of an initialized DeepSpeed engine's optimizer."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    classes = {
        FP16_UnfusedOptimizer: ReplicatedMasters,
        BF16_Optimizer: BF16,
        DeepSpeedZeroOptimizer: ZeroOneTwo,
        DeepSpeedZeroOptimizer_Stage3: Chunked,
    }
    wrapper = type(engine.optimizer)
    if wrapper in classes:
        return classes[wrapper](engine)
    if issubclass(wrapper, torch.optim.Optimizer):
        return Replicated(engine)
    raise ValueError(f"DeepSpeed's {wrapper.__name__} is not supported: use ZeRO stage 0 to 3 without special wrappers")
