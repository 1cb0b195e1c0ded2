"""How ranks find each other: the variables of every launcher, the network interface, and the limits of this process.

torch wants RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. DeepSpeed's launcher and torchrun set them. Under
`mpirun` (also `deepspeed --launcher openmpi` and `mpich`) and under Slurm they are derived here, and a plain `python`
run has one rank. What cannot be derived is refused: ranks that do not know of each other would train alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import resource
import socket
import zlib
from dataclasses import dataclass

import psutil

from engine.errors import UserError, quoted

DEFAULT_PORT = 29500  # torchrun's and DeepSpeed's own
_MOST_FILES = 1 << 20  # a larger limit helps nobody, and some programs loop over all possible numbers
_ADVICE = (
    ": use a launcher (deepspeed, torchrun, srun, mpirun) or unset RANK, WORLD_SIZE and LOCAL_RANK for one process"
)


def adopt_launcher_environment() -> None:
    """Fill in torch's rendezvous variables, and what a rank needs before its groups are formed."""
    env = os.environ
    raise_file_limit()
    # NCCL then starts the kernels of several communicators in the order of the program, on all ranks the same. ZeRO's
    # groups and AGVM's run beside each other: without an order two kernels can wait for each other for good.
    env.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if "RANK" in env or "WORLD_SIZE" in env:
        env.setdefault("LOCAL_RANK", "0")
        _check_launcher()
    elif (mpi := _mpi()) is not None:
        _adopt_mpi(mpi)
    elif _slurm():
        _adopt_slurm()
    else:
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    choose_interface()


def ranks_share_devices() -> bool:
    """Whether the launcher gives all ranks of a node the same devices. Slurm and MPI may give each rank its own."""
    return any(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE"))  # torchrun, deepspeed


def ranks_on_this_node() -> int | None:
    """Their number as the launcher says it; None if it does not."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *_OPEN_MPI.local_world, *_HYDRA.local_world)
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    alike = re.fullmatch(r"(\d+)(\(x\d+\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 8(x60)
    return int(alike.group(1)) if alike and "SLURM_PROCID" in os.environ else None


# --- the launchers


def _check_launcher() -> None:
    """Refuse variables of a launcher that are half set: the ranks would wait for each other, or train alone."""
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    _number("LOCAL_RANK")
    if world < 1 or not 0 <= rank < world:
        raise UserError(f"RANK is {rank} and WORLD_SIZE is {world}: RANK must be from 0 to WORLD_SIZE - 1")
    if world > 1 and not os.environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE is {world} but MASTER_ADDR is not set: ranks cannot find each other{_ADVICE}")
    if world > 1 or "MASTER_PORT" in os.environ:
        _check_port()
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))


def _check_port() -> None:
    port = _number("MASTER_PORT")
    if not 0 < port < 65536:
        raise UserError(f"MASTER_PORT must be from 1 to 65535, got {port}")


@dataclass(frozen=True)
class _Mpi:
    """The names of one MPI's variables."""

    name: str
    rank: str
    world: str
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...]
    export: str  # how its mpirun passes a variable on


_OPEN_MPI = _Mpi(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "-x MASTER_ADDR=HOST",
)
_HYDRA = _Mpi(  # the starter of MPICH, Intel MPI and MVAPICH; PMI_LOCAL_RANK is Cray's
    "MPICH",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    "-genv MASTER_ADDR HOST",
)


def _mpi() -> _Mpi | None:
    """The MPI that started this rank. An mpirun inside a Slurm job sees Slurm's variables too: those of the job, not of
    the rank. srun itself sets PMI_RANK, but not Hydra's local ranks."""
    env = os.environ
    if _OPEN_MPI.rank in env or _OPEN_MPI.world in env:
        return _OPEN_MPI
    by_hydra = any(name in env for name in _HYDRA.local_rank)
    if (_HYDRA.rank in env or _HYDRA.world in env) and (by_hydra or not _slurm()):
        return _HYDRA
    return None


def _adopt_mpi(mpi: _Mpi) -> None:
    env = os.environ
    rank, world = _number(mpi.rank), _number(mpi.world)
    if world < 1 or not 0 <= rank < world:
        raise UserError(f"{mpi.rank} is {rank} and {mpi.world} is {world}: a rank must be from 0 to their number - 1")
    local_rank = _first_number(("LOCAL_RANK", *mpi.local_rank))
    local_world = _first_number(mpi.local_world)
    if local_rank is None and world > 1:
        raise UserError(f"{mpi.name} started {world} ranks but did not set {mpi.local_rank[0]}: set LOCAL_RANK")
    alone = world == 1 or local_world == world
    if not env.get("MASTER_ADDR"):
        if not alone:
            raise UserError(
                f"{mpi.name} started {world} ranks on several hosts and MASTER_ADDR is not set: give mpirun "
                f"{mpi.export}, the host of rank 0"
            )
        env["MASTER_ADDR"] = "127.0.0.1"
    env.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local_rank or 0))
    if "MASTER_PORT" not in env:
        env["MASTER_PORT"] = str(_port_of_job(one_host=alone))
    _check_port()


def _port_of_job(*, one_host: bool) -> int:
    """A port that all ranks of an MPI job compute alike. Two jobs on one host rarely get the same one."""
    job = os.environ.get("PMIX_NAMESPACE")
    if job is None and one_host:
        job = str(os.getppid())  # the starter is the parent of all its ranks on a host
    return DEFAULT_PORT if job is None else 20000 + zlib.crc32(job.encode()) % 10000


def _slurm() -> bool:
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"):
        _number(name, default=1)
    return int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ


def _adopt_slurm() -> None:
    env = os.environ
    first_host = _first_slurm_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "localhost"))
    # All ranks of a job compute the same port; two jobs on one node rarely get the same one.
    port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_NTASKS"], LOCAL_RANK=env.get("SLURM_LOCALID", "0"))
    env.setdefault("MASTER_ADDR", first_host)
    env.setdefault("MASTER_PORT", str(port))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise UserError(f"a launcher's variables are half set: {name} is missing{_ADVICE}")
    if not re.fullmatch(r"\d{1,9}", text):
        raise UserError(f"{name} must be a whole number, got {quoted(text)}{_ADVICE}")
    return int(text)


def _first_number(names: tuple[str, ...]) -> int | None:
    return next((_number(name) for name in names if name in os.environ), None)


def _first_slurm_host(nodes: str) -> str:
    """`gpu[003-010,015],cpu1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    return (match.group(1) + (match.group(2) or "")) if match else "localhost"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- the network interface


def choose_interface() -> None:
    """Let gloo use the interface that leads to MASTER_ADDR, if there is more than one host.

    By itself gloo takes the address of the host's own name. Debian's /etc/hosts makes that 127.0.1.1, where no other
    host finds this one. NCCL is left alone: it looks at the interfaces itself, skips the loopback, and may know faster
    ones than that of MASTER_ADDR.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not _several_hosts():
        return
    name = _interface_of(_address_towards(os.environ["MASTER_ADDR"]))
    if name is None:
        # On the host of rank 0 the name in MASTER_ADDR may itself mean 127.0.1.1. Then it is the interface that leads
        # out of this host, or the only one; nothing is sent to the address, which is one for documentation.
        name = _interface_of(_address_towards("192.0.2.1")) or _only_interface()
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _several_hosts() -> bool:
    """False if all ranks are on this host, or MASTER_ADDR says so."""
    master, world = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("WORLD_SIZE", "1"))
    return world > 1 and not _is_loopback(master) and ranks_on_this_node() != world


def _address_towards(host: str) -> str | None:
    """This host's own address on the way to another. Connecting a UDP socket sends nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
    return None


def _interface_of(address: str | None) -> str | None:
    """The interface that has this address. The way to a host's own address leads through `lo`, but is not `lo`'s."""
    if address is None or _is_loopback(address):
        return None
    for name, own in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address.split("%")[0] for entry in own):
            return name
    return None


def _only_interface() -> str | None:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    names = [
        name
        for name, own in psutil.net_if_addrs().items()
        if name in up and any(e.family == socket.AF_INET and not _is_loopback(e.address) for e in own)
    ]
    return names[0] if len(names) == 1 else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("localhost.")


# --- limits


def raise_file_limit() -> None:
    """Let this process open as many files as it is allowed to: a rank has sockets to others, and its loaders share
    tensors as open files. The usual 1024 is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
