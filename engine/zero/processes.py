"""Start DeepSpeed in this process: import it without notices, form the process groups, and leave them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine import distributed
from engine.errors import UserError
from engine.rendezvous import ranks_on_this_node, ranks_share_devices


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


_timeout = timedelta(minutes=30)  # of every process group, until the config says otherwise


def new_group(ranks: Sequence[int]) -> Any:
    """A process group on the accelerator's backend, with the timeout of the run; torch's own for NCCL is 10 minutes."""
    return dist.new_group(list(ranks), timeout=_timeout)


def set_timeout(minutes: float) -> None:
    """Give all process groups this timeout, those that exist and those to come. All ranks call this alike."""
    global _timeout
    _timeout = timedelta(minutes=minutes)
    for group in (None, distributed.control_group()):
        dist.set_timeout(_timeout, group)


def init_distributed(*, init_method: str | None = None, rank: int = -1, world_size: int = -1) -> None:
    """Form the process group through DeepSpeed, on the accelerator that it finds."""
    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    compile_nothing()
    if get_accelerator().device_name() != "cpu":
        choose_device(get_accelerator())
    deepspeed.init_distributed(
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=_timeout,
        auto_mpi_discovery=False,
        verbose=False,
    )
    # DeepSpeed makes its groups without a timeout (0.19.8): then they have torch's, not that of the first group.
    deepspeed.comm.comm.cdb.new_group = new_group
    distributed.set_control_group(dist.new_group(backend="gloo", timeout=_timeout))


def choose_device(accelerator: Any) -> None:
    """Use the device of this rank, in DeepSpeed too.

    Slurm and MPI may show every rank one device of its own, number 0 to all of them. DeepSpeed 0.19.8 takes LOCAL_RANK
    as the device's number in several places, so it becomes that number, and the place on the node is kept apart.
    """
    place = distributed.local_rank()
    ranks = max(ranks_on_this_node() or 0, place + 1)
    index = device_index(place, ranks, accelerator.device_count(), shared=ranks_share_devices())
    if index != place:
        distributed.set_local_rank(place)
        os.environ["LOCAL_RANK"] = str(index)
        if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # DeepSpeed wants the two to be the same
            os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(index)
    accelerator.set_device(index)


def device_index(local_rank: int, local_ranks: int, devices: int, *, shared: bool) -> int:
    """The number of a rank's device among those it sees. `shared`: the ranks of a node are known to see the same."""
    if devices == 1 and not shared:
        return 0
    if local_ranks > devices:  # said by all ranks of the node, not only by those without a device
        raise UserError(
            f"{local_ranks} ranks were started on a node that shows each of them the same {devices} devices: start at "
            f"most {devices} there"
        )
    return local_rank


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
    distributed.set_local_rank(None)
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
