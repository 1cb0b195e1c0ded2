"""Start DeepSpeed in this process: import it without notices, form the process groups, and leave them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine import distributed


def import_deepspeed() -> Any:
    """Import DeepSpeed without its start-up notices; later warnings are still shown."""
    logging.disable(logging.WARNING)
    try:
        import deepspeed
    finally:
        logging.disable(logging.NOTSET)
    return deepspeed


def import_late_parts() -> None:
    """Import now what DeepSpeed imports only when it wraps an optimizer, torch's compiler included. It saves seconds in
    every process that is forked from this one."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401


TIMEOUT = timedelta(minutes=30)  # of every process group: a rank may be busy with scoring that long


def new_group(ranks: Sequence[int]) -> Any:
    """A process group on the accelerator's backend. torch's own timeout would be shorter than that of the run."""
    return dist.new_group(list(ranks), timeout=TIMEOUT)


def init_distributed(*, init_method: str | None = None, rank: int = -1, world_size: int = -1) -> None:
    """Form the process group through DeepSpeed, on the accelerator that it finds."""
    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    compile_nothing()
    deepspeed.init_distributed(
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        auto_mpi_discovery=False,
        verbose=False,
    )
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(distributed.local_rank())
    distributed.set_control_group(dist.new_group(backend="gloo", timeout=TIMEOUT))


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling; call it before the process group is formed.

    DeepSpeed 0.19.8 compiles a shared-memory all-reduce for CPU ranks at start-up (90 s, needs a compiler, and a
    process killed meanwhile leaves a lock that hangs all later ones). If the op is marked incompatible, it uses gloo.
    """
    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def reset_distributed() -> None:
    """Leave the process group so that another can be formed in this process."""
    import deepspeed

    distributed.set_control_group(None)
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
