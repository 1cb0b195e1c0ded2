"""Signals, refusals and going on, as a user meets them: real launchers, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forking import Script, environment, wait_for
from test_end_to_end import LAUNCH, by_hand
from tiny_run import merged
from tiny_run import saved_weights as weights

from engine import preemption
from engine.checkpoints.finding import find_checkpoint
from launch.command import LastingOutput

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
    """A process of its own session, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def steps_on_record(work: Path) -> int:
    records = work / "metrics.jsonl"
    return len(records.read_text().splitlines()) if records.exists() else 0


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
    process = Script(LAUNCH / "train.py", "--config", "long.json", "--work-dir", "work", folder=folder)
    wait_for(lambda: steps_on_record(folder / "work") >= 3)
    process.signal(signal.SIGTERM)
    code = process.wait()
    return folder / "work", code, process.stdout + process.stderr


def test_a_signal_saves_and_exits_with_its_own_code(stopped):
    work, code, output = stopped
    steps = steps_on_record(work)
    assert code == 75, output
    assert f"stopped by a signal after step {steps}, saved in {work / 'checkpoints'}: continue with --resume" in output
    assert find_checkpoint(work).step == steps
    assert "Traceback" not in output


def test_a_used_work_dir_is_refused_with_the_two_choices(stopped, folder):
    refused = Script(LAUNCH / "train.py", "--config", "long.json", "--work-dir", "work", folder=folder)
    assert refused.wait() == 2
    words = "already holds a run: continue it with --resume, or start a new run in another with --work-dir"
    assert words in refused.stderr


def test_a_run_goes_on_from_its_folder_alone_on_two_ranks(stopped, folder):
    work, _, _ = stopped
    step = find_checkpoint(work).step
    more = ("--resume", "work", "--set", f"schedule.steps={step + 2}")
    output = by_hand(LAUNCH / "train.py", *more, folder=folder)
    assert f"resume  {work}/checkpoints/step-{step:06d} (ZeRO-2, 1 ranks, float32), step {step} of {step + 2}" in output
    assert f"changed, from here on   schedule.steps: 4000 -> {step + 2}" in output
    assert "changed, same result    gradient_accumulation_steps: 4 -> 2" in output
    records = [json.loads(line)["step"] for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert records == list(range(1, step + 3))
    assert find_checkpoint(work).step == step + 2


def test_a_second_signal_ends_the_run_at_once(folder):
    long = ("--set", "gradient_accumulation_steps=4000", "--set", "train_batch_size=4000")
    process = Script(LAUNCH / "train.py", "--config", "long.json", "--work-dir", "second", *long, folder=folder)
    wait_for(lambda: "ZeRO-2" in process.stdout)  # the last line before its first, long step
    time.sleep(0.5)
    process.signal(signal.SIGTERM)
    time.sleep(preemption.ECHO + 0.5)  # what comes sooner is taken for the same signal
    assert process.poll() is None
    process.signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not (folder / "second" / "checkpoints").exists()


def test_a_signal_to_all_processes_of_the_launcher_is_one_signal(folder):
    launcher = (DEEPSPEED, "--num_accelerators", 2, "--master_port", 29732)
    process = start(folder, *launcher, LAUNCH / "train.py", "--config", "long.json", "--work-dir", "group")
    try:
        wait_for(lambda: steps_on_record(folder / "group") >= 3 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGTERM)
        output = process.communicate(timeout=120)[0]
        wait_for(lambda: members(process.pid) == [], timeout=60)
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    steps = steps_on_record(folder / "group")
    assert f"stopped by a signal after step {steps}" in output, output
    assert find_checkpoint(folder / "group").step == steps
    assert len(weights(folder / "group")[0]) > 40


def test_a_signal_to_the_launcher_alone_stops_its_ranks(folder):
    """DeepSpeed's launcher ends and tells nobody: its ranks find out, save and leave."""
    launcher = (DEEPSPEED, "--num_accelerators", 2, "--master_port", 29733)
    process = start(folder, *launcher, LAUNCH / "train.py", "--config", "long.json", "--work-dir", "alone")
    try:
        wait_for(lambda: steps_on_record(folder / "alone") >= 3 or process.poll() is not None)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
        wait_for(lambda: members(process.pid) == [], timeout=20)
        output = process.communicate(timeout=20)[0]
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    steps = steps_on_record(folder / "alone")
    assert f"stopped by the end of its launcher after step {steps}, saved in" in output, output
    assert find_checkpoint(folder / "alone").step == steps and "Traceback" not in output
    assert not (folder / "alone" / "run.lock").exists()


def two_ranks(folder: Path, *command) -> list[Script]:
    """Two ranks without a launcher."""
    where = dict(WORLD_SIZE="2", LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    train = (LAUNCH / "train.py", "--config", "long.json", *command)
    return [Script(*train, folder=folder, RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in (0, 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_killed_rank_ends_the_others_with_one_sentence(folder):
    first, second = two_ranks(folder, "--work-dir", "killed")
    wait_for(lambda: steps_on_record(folder / "killed") >= 3 or first.poll() is not None)
    second.signal(signal.SIGKILL)
    assert first.wait(10) == 69, first.stderr
    assert second.wait() == -signal.SIGKILL
    errors = [line for line in first.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and f"rank 1 on {socket.gethostname()} is gone" in errors[0], first.stderr
    assert "Traceback" not in first.stderr
    assert not (folder / "killed" / "run.lock").exists()


def test_an_interrupted_run_saves_and_a_second_run_beside_it_is_refused(folder):
    process = Script(LAUNCH / "train.py", "--config", "long.json", "--work-dir", "busy", folder=folder)
    wait_for(lambda: steps_on_record(folder / "busy") >= 3 or process.poll() is not None)
    others = two_ranks(folder, "--work-dir", "busy", "--resume")
    assert [other.wait() for other in others] == [2, 2]
    words = f"busy is in use by another run (host {socket.gethostname()}, process {process.pid}, since 20"
    assert words in others[0].stderr and "Traceback" not in others[0].stderr + others[1].stderr, others[0].stderr
    process.signal(signal.SIGINT)
    assert process.wait() == 75, process.stderr
    assert "Ctrl-C: saving after this step" in process.stderr
    steps = steps_on_record(folder / "busy")
    assert f"stopped by a signal after step {steps}, saved in" in process.stdout
    assert find_checkpoint(folder / "busy").step == steps


def test_output_that_nobody_reads_does_not_stop_a_run():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    output = LastingOutput(stream)
    for _ in range(3):
        print("a line", file=output, flush=True)
    assert output.fileno() == writing
    stream.close()


def test_resume_without_a_run_is_said(folder):
    for command, sentence in (
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--config", "long.json", "--resume"], "--resume does not say which run"),
        ([], "--deepspeed_config is required, or --resume with the folder of a run"),
    ):
        process = Script(LAUNCH / "train.py", *command, folder=folder)
        assert process.wait() == 2
        assert sentence in process.stderr and "Traceback" not in process.stderr, process.stderr
