"""Processes forked from one that has imported everything, and launch scripts run in them.

A script in a forked process is the script as a user runs it, but for its imports, which are done already. What depends
on a launcher or on a fresh interpreter is tested with real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Variables of a launcher, which a process that has none must not inherit.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


def context() -> Any:
    """multiprocessing's forkserver, with everything imported in it."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["preloaded"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return server


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a launcher's variables."""
    return {**{k: v for k, v in os.environ.items() if k not in LAUNCHER}, "OMP_NUM_THREADS": "1", **more}


class Script:
    """A launch script in a process of its own; what it prints goes to files."""

    def __init__(self, *command: Any, folder: Path, **variables: str) -> None:
        self._output = [Path(tempfile.mkstemp(prefix="gigadet-script-")[1]) for _ in range(2)]
        self._process = context().Process(
            target=_run,
            args=([str(part) for part in command], str(folder), environment(**variables), self._output),
            daemon=True,  # it ends with pytest, whatever a test forgot
        )
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self._output[0].read_text()

    @property
    def stderr(self) -> str:
        return self._output[1].read_text()

    def poll(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 120) -> int:
        """The exit code; a script that takes longer is killed, and the test fails."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"the script did not end within {timeout:g} s\n{self.stdout}{self.stderr}")
        return self._process.exitcode


def as_if_started_by_a_shell() -> None:
    """Let this forked process start others as a plain one does: loaders are forked, and find out if it is gone."""
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no children
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run where it is ignored, behind `&`


def _run(command: list[str], folder: str, variables: dict[str, str], output: list[Path]) -> None:
    as_if_started_by_a_shell()
    for number, path in enumerate(output, 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def wait_for(condition: Any, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s"
        time.sleep(0.05)
