"""Read shards from DeepSpeed's files, and fill the shards of a running engine.

The files of every DeepSpeed wrapper hold the same two things in different places: flat master weights, and the
optimizer state of each. The manifest of a checkpoint names the layout class of the run that saved it, and so the place.
The name decides here, not an instance: a checkpoint is read without the DeepSpeed engine that wrote it, on any number
of ranks and at any stage. Shards have the numbers that the layout of the saving run gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.zero.geometry import Fragment
from engine.zero.layout import Layout

WEIGHTS = "fp32"  # the name of master weights among the states, as in DeepSpeed's universal format


class StoredShard(NamedTuple):
    weights: Tensor
    state: Mapping[str, Any]


def stored_shards(
    layout: str, names: Sequence[str], model_states: Mapping[str, Any], zero_states: Mapping[str, Any]
) -> list[StoredShard]:
    """The shards in the files of one rank. `layout` and `names` are the layout class and the parameters of that run."""
    if layout == "Replicated":
        state = model_states["optimizer"]["state"]
        weights = [model_states["module"][name] for name in names]
    elif layout == "ReplicatedMasters":
        state = model_states["optimizer"]["optimizer_state_dict"]["state"]
        weights = [p for group in model_states["optimizer"]["fp32_groups"] for p in group]
    elif layout in ("ZeroOneTwo", "BF16"):
        content = zero_states["optimizer_state_dict"]
        state, weights = content["base_optimizer_state"]["state"], content["single_partition_of_fp32_groups"]
    elif layout == "Chunked":
        content = zero_states["optimizer_state_dict"]
        state, weights = content["optimizer_state_dict"]["state"], content["fp32_flat_groups"]
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return [StoredShard(flat.detach(), state.get(k, {})) for k, flat in enumerate(weights)]


def common_state(content: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a saved optimizer state that belongs to no shard: the param groups and DeepSpeed's own entries."""
    base = content.get("base_optimizer_state") or content.get("optimizer_state_dict") or content
    sharded = (
        "base_optimizer_state",
        "optimizer_state_dict",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "fp32_groups",
        "param_slice_mappings",
        "state",
    )
    common = {key: value for key, value in content.items() if key not in sharded}
    return {**common, "param_groups": base["param_groups"]}


def is_elementwise(value: Any, weights: Tensor) -> bool:
    """Whether an entry of the optimizer state has one number per element of the shard, unlike `step`."""
    # Weights are saved without the padding at their end, their state with it.
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() >= weights.numel() > 0


def stored_states(state: Mapping[str, Any], weights: Tensor) -> list[str]:
    """The names of a shard's element-wise states."""
    return sorted(key for key, value in state.items() if is_elementwise(value, weights))


@torch.no_grad()
def fill(
    layout: Layout,
    names: Sequence[str],
    optimizer: torch.optim.Optimizer,
    *,
    states: Sequence[str],
    read: Callable[[str, str, int, int], Tensor],
    scalars: Callable[[str], Mapping[str, Any]],
    progress: Callable[[int], None],
) -> None:
    """Fill this rank's shards and their optimizer state, range by range. Call `layout.publish` afterwards.

    `read(name, state, start, stop)` gives a range of a flattened parameter's master weights or of a state of it.
    """
    shards = layout.shards()
    # torch keeps its step counters on the CPU, except with these two options.
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    on_device = {shard: shard.device if fused else torch.device("cpu") for shard in shards.values()}
    for shard in shards.values():
        state = optimizer.state[shard]
        for key in states:
            if not isinstance(state.get(key), Tensor) or state[key].shape != shard.shape:
                state[key] = torch.zeros_like(shard, memory_format=torch.preserve_format)
    for fragment in layout.held():
        name, shard = names[fragment.param], shards[fragment.shard]
        _put(shard, fragment, read(name, WEIGHTS, fragment.start, fragment.stop))
        for key in states:
            _put(optimizer.state[shard][key], fragment, read(name, key, fragment.start, fragment.stop))
        for key, value in scalars(name).items():
            # Each shard needs its own tensor: optimizers count in place.
            optimizer.state[shard][key] = value.to(on_device[shard], copy=True) if isinstance(value, Tensor) else value
        progress(fragment.stop - fragment.start)


def _put(target: Tensor, fragment: Fragment, values: Tensor) -> None:
    if values.numel() == target.numel():
        target.copy_(values.view(target.shape))
    else:
        target.view(-1)[fragment.offset : fragment.offset + values.numel()].copy_(values)
