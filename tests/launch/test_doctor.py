"""`launch/doctor.py` as a user runs it: all well, something wrong, ranks that hang, ranks that never meet."""

import json
import re
import socket
from pathlib import Path

from forking import Script

LAUNCH = Path(__file__).parents[2] / "launch"
DOCTOR = LAUNCH / "doctor.py"


def start(folder, *command, world, started=None, **variables):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = dict(WORLD_SIZE=str(world), LOCAL_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **variables)
    return [
        Script(*command, folder=folder, RANK=str(rank), LOCAL_RANK=str(rank), **where)
        for rank in (range(world) if started is None else started)
    ]


def test_two_ranks_are_well(tmp_path):
    first, second = start(tmp_path, DOCTOR, "--work-dir", "runs", world=2, SECRET_KEY="hunter2")
    assert (first.wait(), second.wait()) == (0, 0), first.stdout + first.stderr + second.stderr
    assert second.stdout == "" and first.stderr == ""
    *lines, last = first.stdout.splitlines()
    path = tmp_path / "runs" / "doctor.json"
    assert re.fullmatch(rf"all well: 21 checks in \d+ s on 2 ranks; details: {path}", last)
    checks = [line for line in lines if line.startswith(("PASS", "FAIL", "SKIP"))]
    assert [line[:4] for line in checks].count("PASS") == 20 and "SKIP  own device" in first.stdout
    assert all(re.search(r"\(\d+\.\d s\)$", line) for line in checks)
    for words in ("AGVM = twin, ZeRO-3", "save = resume, ZeRO-3", "stages alike", "HTC-X, one step", "roi_align"):
        assert re.search(rf"^PASS  {words}", first.stdout, re.MULTILINE), words
    table = first.stdout.split("busbw (GB/s)\n")[1].splitlines()[:7]
    assert [int(row.split()[0]) for row in table] == [4 * 16**power for power in range(7)]

    written = path.read_text()
    report = json.loads(written)
    assert report["screen"] == [*lines, last] and len(report["checks"]) == 21
    assert [rank["rank"] for rank in report["facts"]["ranks"]] == [0, 1]
    assert "hunter2" not in written
    assert [entry.name for entry in path.parent.iterdir()] == ["doctor.json"]  # all else is removed


def test_quick_on_one_rank_says_that_nobody_is_there(tmp_path):
    process = Script(DOCTOR, "--quick", "--out", "mine.json", folder=tmp_path)
    assert process.wait() == 0, process.stdout + process.stderr
    assert "SKIP  all-reduce             one rank, nobody to talk to" in process.stdout
    assert "twin" not in process.stdout and (tmp_path / "mine.json").is_file()


def test_bad_arguments_are_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    process = Script(DOCTOR, "--quick", "--work-dir", "file", folder=tmp_path)
    assert process.wait() == 2
    assert re.fullmatch(r"error: --work-dir \S+/file cannot be written: .*\n", process.stderr)


def patched(folder, fault):
    """A script that runs the doctor after a change of it."""
    path = folder / "patched.py"
    path.write_text(f"import os, runpy\n{fault}\nrunpy.run_path({str(DOCTOR)!r}, run_name='__main__')\n")
    return path


def test_a_failed_check_is_named_and_the_others_run(tmp_path):
    script = patched(
        tmp_path,
        "from engine.doctor import disk\n"
        "def broken(folder):\n"
        "    raise OSError(28, 'No space left on device')\n"
        "disk.write_speed = broken",
    )
    process = Script(script, "--quick", folder=tmp_path)
    assert process.wait() == 2
    assert re.search(r"^FAIL  disk, speed .*No space left on device", process.stdout, re.MULTILINE)
    assert "all-reduce" in process.stdout
    assert re.fullmatch(
        r"error: 7 checks in \d+ s on 1 rank, failed: disk, speed; details: .*/work_dirs/doctor.json\n", process.stderr
    )
    report = json.loads((tmp_path / "work_dirs" / "doctor.json").read_text())
    (failed,) = [check for check in report["checks"] if check["status"] == "FAIL"]
    assert "Traceback" in failed["details"]["traceback"]


def test_a_rank_that_fails_where_others_wait_for_it(tmp_path):
    script = patched(
        tmp_path,
        "from engine.doctor import network, watchdog\n"
        "watchdog.GRACE = 1.0\n"
        "whole = network._measure\n"
        "def broken(size, world):\n"
        "    if os.environ['RANK'] == '1' and size > 1000:\n"
        "        raise RuntimeError('unhandled system error')\n"
        "    return whole(size, world)\n"
        "network._measure = broken",
    )
    ranks = start(tmp_path, script, "--quick", world=2)
    assert [rank.wait() for rank in ranks] == [2, 2]
    # Not the limit of a check but the error of rank 1 ended it.
    wanted = "FAIL  all-reduce             rank 1: RuntimeError: unhandled system error (the other ranks waited for it)"
    assert wanted in ranks[0].stdout
    assert ranks[0].stderr.startswith("error: all-reduce hangs, and what comes after it was not tried; details: ")
    report = json.loads((tmp_path / "work_dirs" / "doctor.json").read_text())
    assert report["checks"][-1]["status"] == "FAIL" and report["screen"][-1] in ranks[0].stderr


def test_ranks_that_never_meet_are_told_where_they_wait(tmp_path):
    (alone,) = start(tmp_path, DOCTOR, "--limit", "3", world=2, started=[0])
    assert alone.wait() == 2
    assert re.search(
        r"^FAIL  meeting .*within 3 s: rank 0 of 2 on \S+ looks for the others at 127.0.0.1:\d+; are all ranks started",
        alone.stdout,
    )
    assert alone.stderr.startswith("error: meeting hangs")
