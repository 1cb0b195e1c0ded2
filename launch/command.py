"""Shared by the scripts: arguments, and one sentence instead of a traceback for errors that the user can fix."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from engine import heartbeat, launcher
from engine.errors import UserError, short

USER_ERROR = 2
LEFT_OUT = 3  # done, but without what the messages name
LONGEST = 2000  # letters of a message: no mistake needs more, and a value may be of any length
# Launchers end all ranks of a node when one exits, so the other ranks wait until the error is printed.
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
    # Arguments that DeepSpeed's launcher adds, or that its users are used to.
    arguments.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


def add_model_arguments(arguments: argparse.ArgumentParser) -> None:
    """The arguments of `load_model`."""
    arguments.add_argument(
        "checkpoint",
        help="a work dir (its newest checkpoint), one of its checkpoints, a universal folder, or any .pth or "
        ".safetensors file of the model",
    )
    add_config_arguments(arguments, required=False)
    add_trust_argument(arguments)
    arguments.add_argument("--ema", action="store_true", help="the averaged weights of a checkpoint folder (run.ema)")


def add_trust_argument(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--trust-config",
        action="store_true",
        help="obey the config inside the checkpoint or file as one of your own, also where it names Python files or "
        "classes by import path: it is then code of its author (docs/security.md)",
    )


def origin_of(options: argparse.Namespace) -> Any:
    """How far the user trusts the config that a checkpoint or weight file carries."""
    from engine.config.origin import Origin  # here: --help must not wait for pydantic

    return Origin.USER if options.trust_config else Origin.FILE


def load_model(options: argparse.Namespace) -> Any:
    """Form the process group, and load the model that `options` name."""
    # Here, because --help and a wrong option must not wait for torch.
    from engine import distributed
    from engine.inference import load
    from engine.zero.processes import init_distributed, set_timeout

    init_distributed()
    watch_ranks()
    with distributed.together():
        loaded = load.load_model(
            options.checkpoint, options.deepspeed_config, options.set, ema=options.ema, origin=origin_of(options)
        )
    set_timeout(loaded.config.run.timeout_minutes)
    return loaded


def watch_ranks() -> None:
    """Let every rank notice when another is gone. All ranks call this together, after `init_distributed`."""
    from engine import distributed, folder_lock  # here: torch is slow to import

    problem = heartbeat.start(
        distributed.rank(),
        distributed.local_rank(),
        distributed.world_size(),
        broadcast=distributed.broadcast_object,
        gather=distributed.all_gather_objects,
        before_end=folder_lock.release_all,
    )
    if problem is not None:
        distributed.say(f"ranks   a rank that dies will be noticed late: {problem}")


def writable_folder(name: str | os.PathLike[str], option: str) -> Path:
    """The folder, created if necessary. Checks that files can be written to it before time is spent on them."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"{option} {folder} cannot be written: {error.strerror}") from None
    return folder


def run_command(body: Callable[[], None]) -> None:
    """Run a script's body. A UserError is printed as one sentence (once per node), and the exit code is 2."""
    launcher.remember()
    _share_cores()
    from engine import distributed  # here: torch creates its threads when it is imported
    from engine.rendezvous import adopt_launcher_environment

    try:
        adopt_launcher_environment()
        body()
    except UserError as error:
        sentence = f"error: {short(' '.join(str(error).splitlines()), LONGEST)}"
        _tell_torchrun(sentence)
        if _is_first_on_node(distributed.local_rank):
            print(sentence, file=sys.stderr, flush=True)
        else:
            time.sleep(WAIT_FOR_MESSAGE)
        leave(USER_ERROR)
    except KeyboardInterrupt:
        leave(130)
    except Exception:
        heartbeat.settle()
        raise
    heartbeat.stop(0)
    _close_process_group()


class LastingOutput:
    """A stream that goes on, to nowhere, when its reader is gone.

    A signal to all processes also ends the `tee` behind a run, and a closed terminal reads no more. An error from the
    next print would then end the run before it has saved.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._going_on():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._going_on():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _is_first_on_node(local_rank: Callable[[], int]) -> bool:
    try:
        return local_rank() == 0
    except ValueError:  # LOCAL_RANK is no number, which is the error to be printed
        return True


def _tell_torchrun(sentence: str) -> None:
    """Write the sentence where torchrun looks for a rank's error: it ends its own long report with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": sentence, "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


def _share_cores() -> None:
    """Divide the cores among the ranks of this node, unless a launcher or the user has set the threads."""
    names = (
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_NTASKS_PER_NODE",
        "WORLD_SIZE",
    )
    ranks = next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    # Waiting threads sleep instead of spinning on a core that other ranks or programs could use.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _close_process_group() -> None:
    import torch.distributed as dist  # here: --help must not wait for torch

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """Exit without waiting for loader processes, or for ranks that never reach a collective."""
    heartbeat.stop(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
