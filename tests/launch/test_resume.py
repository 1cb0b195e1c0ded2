"""Signals, refusals and going on, as a user meets them: real launchers, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_end_to_end import LAUNCH, run
from tiny_run import merged
from tiny_run import saved_weights as weights

from engine.checkpoints.finding import find_checkpoint

LONG = {
    "zero_optimization": {"stage": 2},
    "schedule": {"steps": 4000},
    "data": {"workers": 1},
    "run": {"checkpoint_interval": None},
}
DEEPSPEED = Path(sys.executable).with_name("deepspeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    (folder / "long.json").write_text(json.dumps(merged(LONG)))
    return folder


def start(folder: Path, *command) -> subprocess.Popen:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {**{k: v for k, v in os.environ.items() if k not in dropped}, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_steps(process: subprocess.Popen, work: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        records = work / "metrics.jsonl"
        if records.exists() and len(records.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError("no step within four minutes")


def members(group: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def stopped(folder):
    """One process, stopped by SIGTERM after a few steps."""
    process = start(folder, LAUNCH / "train.py", "--config", "long.json", "--work-dir", "work")
    wait_for_steps(process, folder / "work", 3)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    return folder / "work", process.returncode, output


def test_a_signal_saves_and_exits_with_its_own_code(stopped):
    work, code, output = stopped
    steps = len((work / "metrics.jsonl").read_text().splitlines())
    assert code == 75, output
    assert f"stopped by a signal after step {steps}, saved in {work / 'checkpoints'}: continue with --resume" in output
    assert find_checkpoint(work).step == steps
    assert "Traceback" not in output


def test_a_used_work_dir_is_refused_with_the_two_choices(stopped, folder):
    refused = start(folder, LAUNCH / "train.py", "--config", "long.json", "--work-dir", "work")
    output = refused.communicate(timeout=120)[0]
    assert refused.returncode == 2
    assert "already holds a run: continue it with --resume, or start a new run in another with --work-dir" in output


def test_a_run_goes_on_from_its_folder_alone_on_two_ranks(stopped, folder):
    work, _, _ = stopped
    step = find_checkpoint(work).step
    output = run(
        DEEPSPEED,
        "--num_accelerators",
        2,
        "--master_port",
        29731,
        LAUNCH / "train.py",
        "--resume",
        "work",
        "--set",
        f"schedule.steps={step + 2}",
        folder=folder,
    )
    assert f"resume  {work}/checkpoints/step-{step:06d} (ZeRO-2, 1 ranks, float32), step {step} of {step + 2}" in output
    assert f"changed, from here on   schedule.steps: 4000 -> {step + 2}" in output
    assert "changed, same result    gradient_accumulation_steps: 4 -> 2" in output
    records = [json.loads(line)["step"] for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert records == list(range(1, step + 3))
    assert find_checkpoint(work).step == step + 2


def test_a_second_signal_ends_the_run_at_once(folder):
    process = start(
        folder,
        LAUNCH / "train.py",
        "--config",
        "long.json",
        "--work-dir",
        "second",
        "--set",
        "gradient_accumulation_steps=4000",
        "--set",
        "train_batch_size=4000",
    )
    time.sleep(1)
    deadline = time.monotonic() + 240
    while not (folder / "second" / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(8)  # inside its first, long step
    process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (folder / "second" / "checkpoints").exists()


def test_a_signal_to_all_processes_of_the_launcher_is_one_signal(folder):
    process = start(
        folder,
        DEEPSPEED,
        "--num_accelerators",
        2,
        "--master_port",
        29732,
        LAUNCH / "train.py",
        "--config",
        "long.json",
        "--work-dir",
        "group",
    )
    wait_for_steps(process, folder / "group", 3)
    os.killpg(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    deadline = time.monotonic() + 60
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert members(process.pid) == []
    steps = len((folder / "group" / "metrics.jsonl").read_text().splitlines())
    assert f"stopped by a signal after step {steps}" in output, output
    assert find_checkpoint(folder / "group").step == steps
    assert len(weights(folder / "group")[0]) > 50


def test_resume_without_a_run_is_said(folder):
    for command, sentence in (
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--config", "long.json", "--resume"], "--resume does not say which run"),
        ([], "--deepspeed_config is required, or --resume with the folder of a run"),
    ):
        process = start(folder, LAUNCH / "train.py", *command)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 2 and sentence in output and "Traceback" not in output, output
