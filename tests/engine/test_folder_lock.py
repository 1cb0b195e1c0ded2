"""One run per folder: who may have it, also after a crash, beside other hosts, and when many start at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import folder_lock
from engine.folder_lock import NAME, InUse, hold, release_all

ROOT = Path(__file__).parents[2]
# Holds the folder, says so, and stays until its input ends. `READY` is awaited first, so that many begin at once.
HOLDER = """
import sys
from pathlib import Path
from engine import folder_lock
folder_lock.RENEWED = float(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    folder_lock.hold(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.readline()
except folder_lock.InUse as error:
    print(error, flush=True)
"""


class Holder:
    def __init__(self, folder: Path, renewed: float = 0.1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), str(renewed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        assert self.output.readline() == "ready\n"

    def go(self) -> Holder:
        self.input.write("\n")
        self.input.flush()
        return self

    def answer(self) -> str:
        return self.output.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    release_all()


def write_lock(folder: Path, **changes: object) -> None:
    """The lock of a process that is not here."""
    content = {
        "host": "node7",
        "pid": 1,
        "started": "5",
        "place": "node7",
        "since": "2026-11-01 10:00:00",
        "token": "t",
    }
    (folder / NAME).write_text(json.dumps({**content, **changes}))


def test_one_of_many_that_begin_at_once_gets_the_folder(tmp_path):
    others = [Holder(tmp_path) for _ in range(6)]
    answers = [other.answer() for other in [other.go() for other in others]]
    assert answers.count("held") == 1, answers
    winner = others[answers.index("held")].process.pid
    assert sum(f"process {winner}, since 20" in answer for answer in answers) == 5, answers
    # Killed, it leaves its lock. Again one of many takes it over.
    next(other for other in others if other.process.pid == winner).kill()
    assert (tmp_path / NAME).exists()
    others = [Holder(tmp_path) for _ in range(6)]
    answers = [other.answer() for other in [other.go() for other in others]]
    assert answers.count("held") == 1, answers
    for other in others:
        other.process.communicate("\n")
    assert list(tmp_path.iterdir()) == []  # released, and no draft is left


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path):
    write_lock(tmp_path, pid=os.getpid(), started="5", place=folder_lock._place())
    hold(tmp_path)
    assert json.loads((tmp_path / NAME).read_text())["token"] != "t"


def test_a_process_that_has_the_folder_may_have_it_twice(tmp_path):
    hold(tmp_path)
    hold(tmp_path)
    release_all()
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("readable", [True, False])
def test_a_lock_of_another_host_is_void_when_it_is_not_renewed(tmp_path, monkeypatch, readable):
    monkeypatch.setattr(folder_lock, "STALE", 1.5)
    write_lock(tmp_path) if readable else (tmp_path / NAME).write_text("")
    began, said = time.monotonic(), []
    hold(tmp_path, said.append)
    assert time.monotonic() - began > 1 and len(said) == 1
    assert "waiting for a sign of life" in said[0] and ("node7" in said[0] or not readable)


def test_a_lock_of_another_host_is_obeyed_when_it_is_renewed(tmp_path):
    write_lock(tmp_path)
    renewal = threading.Timer(0.3, os.utime, [tmp_path / NAME])
    renewal.start()
    with pytest.raises(
        InUse, match="in use by another run .host node7, process 1, since 2026-11-01 10:00:00.: wait for"
    ):
        hold(tmp_path)
    renewal.join()
    assert json.loads((tmp_path / NAME).read_text())["token"] == "t"


def test_an_old_lock_of_another_host_needs_no_waiting(tmp_path):
    write_lock(tmp_path)
    old = time.time() - folder_lock.STALE - 5
    os.utime(tmp_path / NAME, (old, old))
    hold(tmp_path, pytest.fail)


def test_a_lock_that_is_not_void_after_all_is_put_back(tmp_path):
    """Between the look and the removal another start may have taken the void lock over."""
    lock = folder_lock._Lock(tmp_path)
    write_lock(tmp_path, token="void")
    void = folder_lock._read(tmp_path / NAME).holder
    write_lock(tmp_path, token="new")
    lock._remove(void)
    assert json.loads((tmp_path / NAME).read_text())["token"] == "new"
    lock._remove(folder_lock._read(tmp_path / NAME).holder)
    assert list(tmp_path.iterdir()) == []


def test_the_holder_renews_restores_and_gives_way(tmp_path):
    holder = Holder(tmp_path).go()
    assert holder.answer() == "held"
    os.utime(tmp_path / NAME, (0, 0))
    wait_until(lambda: (tmp_path / NAME).stat().st_mtime > 1e9)
    (tmp_path / NAME).unlink()
    wait_until((tmp_path / NAME).exists)
    write_lock(tmp_path)  # it was away for so long that another host has taken over
    assert holder.process.wait(10) == 2
    assert "was taken over by another run (host node7, process 1" in holder.process.stderr.read()
    assert json.loads((tmp_path / NAME).read_text())["token"] == "t"


def test_without_links_the_lock_is_created_alone(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    hold(tmp_path)
    assert Holder(tmp_path).go().answer().startswith(f"{tmp_path} is in use by another run")


def wait_until(condition, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
