"""Whose end is a reason to stop: chains of real processes with the launchers' names, without the launchers' imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Starts the command in its arguments and waits for it, as launchers do.
STARTER = "import os, subprocess, sys\nopen(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\n"
STARTER += "subprocess.Popen(sys.argv[1:]).wait()\n"
# Writes "watching" and then "gone" when it finds its launcher gone.
RANK = """
import os, sys, time
time.sleep(float(os.environ.get("LATE", "0")))
from engine import launcher
launcher.remember()
note = open(os.environ["NOTES"], "a", buffering=1)
note.write("gone\\n" if launcher.gone() else "watching\\n")
while not launcher.gone():
    time.sleep(0.02)
note.write("gone\\n")
"""


@pytest.fixture
def chain(tmp_path):
    """Starts `deepspeed`, launch.py, torchrun or a shell around a rank; ends what is left of them."""
    package = tmp_path / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()  # or the real one would be preferred
    (package / "launch.py").write_text(STARTER)
    for name in ("bin/deepspeed", "bin/torchrun", "wrapper.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(STARTER)
    (tmp_path / "rank.py").write_text(RANK)
    python = sys.executable
    parts = {
        "runner": [python, str(tmp_path / "bin" / "deepspeed")],
        "launch": [python, "-u", "-m", "deepspeed.launcher.launch"],
        "torchrun": [python, str(tmp_path / "bin" / "torchrun")],
        "shell": [python, str(tmp_path / "wrapper.py")],
    }
    notes, pids = tmp_path / "notes", tmp_path / "pids"
    started = []

    def start(*names: str, **variables: str):
        command = [word for name in names for word in parts[name]] + [python, str(tmp_path / "rank.py")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(notes), "PIDS": str(pids), **variables}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True))
        wait_until(lambda: pids.exists() and len(pids.read_text().splitlines()) == len(names))
        if not variables:
            wait_until(notes.exists)
        return [int(pid) for pid in pids.read_text().splitlines()], notes

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("names", "victim"),
    [
        (["runner", "launch"], 0),
        (["runner", "launch"], 1),
        (["shell", "runner", "launch", "shell"], 1),  # the rank is started through a script
        (["torchrun"], 0),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_a_rank_notices_that_its_launcher_is_gone(chain, names, victim, number):
    pids, notes = chain(*names)
    time.sleep(0.1)
    assert notes.read_text() == "watching\n"
    os.kill(pids[victim], number)
    wait_until(lambda: notes.read_text() == "watching\ngone\n", timeout=5)


@pytest.mark.parametrize("names", [["shell"], ["shell", "shell"], ["shell", "runner", "launch"], ["shell", "torchrun"]])
def test_a_shell_may_end_as_it_likes(chain, names):
    pids, notes = chain(*names)
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(0.5)
    assert notes.read_text() == "watching\n"


def test_a_runner_that_ended_while_the_rank_was_being_started_is_missed(chain):
    """DeepSpeed's launch.py takes seconds before it starts a rank, and lives on without its runner."""
    if not adopted_by_init():
        pytest.skip("orphans are adopted by another process than init here")
    pids, notes = chain("runner", "launch", LATE="0.5")
    os.kill(pids[0], signal.SIGKILL)
    wait_until(notes.exists)
    wait_until(lambda: notes.read_text().startswith("gone"))


def adopted_by_init() -> bool:
    code = "import os, time\nif os.fork() == 0:\n time.sleep(0.2)\n print(os.getppid(), flush=True)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1"
