"""The launcher that started this rank, and whether it still runs.

SIGTERM ends DeepSpeed's launcher on one node without a word to the processes it started (DeepSpeed 0.19.8), and no
launcher can pass on a SIGKILL. So a rank remembers who started it. A parent that ends is known by its child's having
another parent: no process number has to be looked up that may belong to someone else by now.

Only launchers are watched. The shell of a plain `python` may end as it likes, as it does under nohup.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath

import psutil

# What starts ranks, and what starts that: DeepSpeed's runner starts its launch.py, on other nodes through a shell.
_DEEPSPEED = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")
_RUNNER = ("deepspeed.launcher.runner", "deepspeed/launcher/runner.py")
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch", "torch/distributed/run.py")
# Variables that only these two launchers set.
_VARIABLES = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")

_NOBODY = 0
_chain: list[tuple[psutil.Process, int]] = []  # processes and their parents, from this one up to the launcher


def remember() -> None:
    """Note the launcher. Call this early: one that ends before is noticed only if init has adopted its child."""
    _chain.clear()
    try:
        above = psutil.Process().parents()
        ranks_launcher = next((place for place, process in enumerate(above) if _starts_ranks(_words(process))), None)
        if ranks_launcher is None:
            if above and _adopts_orphans(above[0]) and any(name in os.environ for name in _VARIABLES):
                _chain.append((psutil.Process(), _NOBODY))
            return
        watched = [psutil.Process(), *above[: ranks_launcher + 2]]
        launch, starter = above[ranks_launcher], above[ranks_launcher + 1 : ranks_launcher + 2]
        of_deepspeed = _names(_words(launch), _DEEPSPEED)
        if not (of_deepspeed and starter and _is_runner(_words(starter[0]))):
            watched = watched[: ranks_launcher + 2]
        _chain.extend((child, parent.pid) for child, parent in zip(watched, watched[1:]))
        if of_deepspeed and starter and _adopts_orphans(starter[0]) and not _is_runner(_words(starter[0])):
            _chain.append((launch, _NOBODY))
    except psutil.Error:  # processes of others may be hidden: then there is nothing to watch
        _chain.clear()


def gone() -> bool:
    """Whether a launcher that was there has ended. It costs a fraction of a millisecond."""
    for child, parent in _chain:
        try:
            if (os.getppid() if child.pid == os.getpid() else child.ppid()) != parent:
                return True
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False
    return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _starts_ranks(words: Sequence[str]) -> bool:
    return _names(words, _DEEPSPEED) or _names(words, _TORCHRUN) or _is_program(words, "torchrun")


def _is_runner(words: Sequence[str]) -> bool:
    """DeepSpeed's runner, or the shell that started launch.py on another node."""
    remote_shell = any(_DEEPSPEED[0] in word for word in words)
    return remote_shell or _names(words, _RUNNER) or _is_program(words, "deepspeed") or _is_program(words, "ds")


def _names(words: Sequence[str], endings: tuple[str, ...]) -> bool:
    """Whether Python was told to run one of these modules or files, rather than to pass its name on."""
    return any(word.endswith(endings) for word in words[:6])


def _is_program(words: Sequence[str], name: str) -> bool:
    """Whether a program of this name runs, by itself or in Python."""
    return any(PurePath(word).name == name for word in words[:3])


def _adopts_orphans(process: psutil.Process) -> bool:
    return process.pid == 1 or process.name() == "systemd"
