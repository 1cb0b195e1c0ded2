"""Ranks: their numbers, how they find each other, and how they exchange small messages.

DeepSpeed's launcher and torchrun set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under Slurm they are
derived from Slurm's own variables, and a plain `python` run has one rank. Collectives on tensors use the accelerator's
backend (NCCL, gloo). Small control messages (flags, objects) use a separate gloo group, so that a decision made on the
CPU never waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import UserError, quoted

_control_group: Any = None


def adopt_launcher_environment() -> None:
    """Fill in torch's rendezvous variables from Slurm, or for a single process."""
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        env.setdefault("LOCAL_RANK", "0")
        _check_launcher()
        return
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"):
        _number(name, default=1)
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        first_host = _first_slurm_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "localhost"))
        # All ranks of a job compute the same port; two jobs on one node rarely get the same one.
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
        env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_NTASKS"], LOCAL_RANK=env.get("SLURM_LOCALID", "0"))
        env.setdefault("MASTER_ADDR", first_host)
        env.setdefault("MASTER_PORT", str(port))
        return
    env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))


def _check_launcher() -> None:
    """Refuse variables of a launcher that are half set: the ranks would wait for each other, or train alone."""
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    _number("LOCAL_RANK")
    if world < 1 or not 0 <= rank < world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE is {world}: RANK must be from 0 to WORLD_SIZE - 1")
    if world > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE is {world} but MASTER_ADDR is not set: ranks cannot find each other{_ADVICE}")
    if world > 1 or "MASTER_PORT" in os.environ:
        port = _number("MASTER_PORT")
        if not 0 < port < 65536:
            raise UserError(f"MASTER_PORT must be from 1 to 65535, got {port}")
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))


_ADVICE = ": use a launcher (deepspeed, torchrun, srun), or unset RANK, WORLD_SIZE and LOCAL_RANK for one process"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"a launcher's variables are half set: {name} is missing{_ADVICE}")
    if not re.fullmatch(r"\d{1,9}", text):
        raise UserError(f"{name} must be a whole number, got {quoted(text)}{_ADVICE}")
    return int(text)


def _first_slurm_host(nodes: str) -> str:
    """`gpu[003-010,015],cpu1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return (match.group(1) + (match.group(2) or "")) if match else "localhost"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def set_control_group(group: Any) -> None:
    """Use this gloo group for small messages. `engine.zero.processes` creates it with the other process groups."""
    global _control_group
    _control_group = group


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


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
