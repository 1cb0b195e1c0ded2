"""Ranks: their numbers, and how they exchange small messages.

How they find each other is in `engine.rendezvous`. Collectives on tensors use the accelerator's backend (NCCL, gloo).
Objects and errors use a separate gloo group, outside the training steps: a ring of gloo takes 2 (N - 1) hops one after
the other, which is far too slow for a step on hundreds of ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import UserError

_control_group: Any = None
_place_on_node: int | None = None  # where LOCAL_RANK had to become the number of the device


def set_control_group(group: Any) -> None:
    """Use this gloo group for small messages. `engine.zero.processes` creates it with the other process groups."""
    global _control_group
    _control_group = group


def control_group() -> Any:
    return _control_group


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This rank's place on its node. Not always LOCAL_RANK, which DeepSpeed takes as the number of the device."""
    return int(os.environ.get("LOCAL_RANK") or 0) if _place_on_node is None else _place_on_node


def set_local_rank(place: int | None) -> None:
    """Keep the place on the node apart from LOCAL_RANK; None: LOCAL_RANK is right."""
    global _place_on_node
    _place_on_node = place


def device() -> torch.device:
    from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

    return torch.device(get_accelerator().current_device_name())


def gather_objects(value: Any) -> list[Any] | None:
    """On rank 0 the values of all ranks, in rank order; None on the others."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, gathered, dst=0, group=_control_group)
    return gathered


def scatter_objects(values: list[Any] | None) -> Any:
    """The value for this rank, of a list that rank 0 has."""
    if world_size() == 1:
        assert values is not None
        return values[0]
    box: list[Any] = [None]
    dist.scatter_object_list(box, values, src=0, group=_control_group)
    return box[0]


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control_group)
    return box[0]


def all_gather_objects(value: Any) -> list[Any]:
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=_control_group)
    return gathered


def sum_over_ranks(flags: torch.Tensor) -> torch.Tensor:
    """All-reduce a small CPU tensor on the control group, in place."""
    if world_size() > 1:
        dist.all_reduce(flags, group=_control_group)
    return flags


def sum_on_device(message: torch.Tensor) -> torch.Tensor:
    """All-reduce a small tensor of the device on the accelerator's own backend, in place. The host does not wait."""
    if world_size() > 1:
        dist.all_reduce(message)
    return message


def barrier() -> None:
    if world_size() > 1:
        dist.barrier(group=_control_group)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise a UserError of any rank, with its text, on every rank."""
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    for source, text in enumerate(all_gather_objects(str(failure) if failure else None)):
        if text is not None:
            raise failure or UserError(f"rank {source}: {text}")


def say(text: str) -> None:
    """Print on rank 0 only."""
    if rank() == 0:
        print(text, flush=True)
