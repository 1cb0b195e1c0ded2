"""What the scripts share: arguments, and one sentence instead of a traceback where the user can help it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

USER_ERROR = 2
# Launchers end all ranks of a node as soon as one has left: the one that tells the error must not be cut off.
WAIT_FOR_MESSAGE = 5.0


def parser(doc: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_config_arguments(arguments: argparse.ArgumentParser, *, required: bool = True) -> None:
    arguments.add_argument(
        "--deepspeed_config",
        "--config",
        required=required,
        metavar="FILE",
        help="a JSON with DeepSpeed's keys and our blocks, or the name of a shipped one (docs/config.md)",
    )
    arguments.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value, e.g. --set schedule.epochs=3 --set data.root=../mine; may be repeated",
    )
    # What DeepSpeed's launcher and its users' habits hand to a script.
    arguments.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def writable_folder(name: str | os.PathLike[str], option: str) -> Path:
    """The folder, made if need be, in which a file can be made: tried before time is spent on what goes into it."""
    from engine.errors import UserError

    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be written: {error.strerror}") from None
    return folder


def run_command(body: Callable[[], None]) -> None:
    """Run a script's body; a UserError becomes one sentence (once a node, or once in all) and exit code 2."""
    _share_cores()  # before torch is imported, for its threads are made then
    from engine.distributed import adopt_launcher_environment
    from engine.errors import UserError

    adopt_launcher_environment()
    try:
        body()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)
        else:
            time.sleep(WAIT_FOR_MESSAGE)
        leave(USER_ERROR)
    except KeyboardInterrupt:
        leave(130)
    _close_process_group()


def _share_cores() -> None:
    """Threads for each rank of this node; a launcher or a user who has set them knows better."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE")
    ranks = next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # A thread that waits for another sleeps instead of spinning on a core that other ranks or programs could use.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int) -> None:
    """Without waiting for loader processes, or for a rank that will never come to a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
