"""A checkpoint that cannot be written: all ranks say so, older ones stay, the run stops or continues as configured."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from resumed_run import settings
from tiny_run import merged, train_tiny

from engine.checkpoints.finding import find_checkpoint, newest
from engine.checkpoints.manifest import Manifest

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def small_disk(limit: int):
    """Writes beyond `limit` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def go_on(folder: str, policy: str, stage: int, full_on: int) -> dict | str:
    """Resume at step 4; on one rank nothing larger than 20 kB can be written."""
    from engine import distributed
    from engine.errors import SaveError

    changes = settings("AdamW", stage, run={"on_save_error": policy}, schedule={"steps": 6})
    with small_disk(20_000) if distributed.rank() == full_on else contextlib.nullcontext():
        try:
            return train_tiny(changes, work_dir=folder, resume="")
        except SaveError as error:
            return str(error)


@pytest.fixture(scope="module", params=[2, 3])
def saved(ranks, request):
    changes = settings("AdamW", request.param)
    return request.param, ranks.run(train_tiny_stopped, 2, changes)[0]["folder"]


def train_tiny_stopped(changes: dict) -> dict:
    return train_tiny(changes, stop_after=4)


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_on_one_rank_stops_all_and_loses_nothing(ranks, saved, tmp_path, full_on):
    stage, folder = saved
    shutil.copytree(folder, tmp_path / "run")
    outcomes = ranks.run(go_on, 2, str(tmp_path / "run"), "stop", stage, full_on)
    assert len(set(outcomes)) == 1
    assert "could not be written" in outcomes[0] and "File too large" in outcomes[0] and "untouched" in outcomes[0]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {
        "step-000003",
        "step-000004",
        "latest",
    }
    assert find_checkpoint(tmp_path / "run").step == 4


def test_a_run_that_may_go_on_without_a_checkpoint_does(ranks, saved, tmp_path):
    stage, folder = saved
    shutil.copytree(folder, tmp_path / "run")
    outcomes = ranks.run(go_on, 2, str(tmp_path / "run"), "continue", stage, 1)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4, 5, 6]
    # It goes on to its end, but what it computed is lost, and that is no success.
    assert len(set(outcomes)) == 1 and "File too large" in outcomes[0]
    assert "all 6 steps are done, but their result is not saved: the checkpoint could not be written" in outcomes[0]
    assert outcomes[0].endswith("the newest one is of step 4")
    assert find_checkpoint(tmp_path / "run").step == 4


def go_on_past_a_full_disk(folder: str) -> dict:
    """Resume at step 4; the save after step 6 fails, the one after the last step does not."""
    from engine.checkpoints import store

    open_aside = store.open_aside

    def full_once(path, tag):
        if tag == "step-000006":
            raise OSError(28, "No space left on device")
        return open_aside(path, tag)

    store.open_aside = full_once
    try:
        changes = settings("AdamW", 2, run={"on_save_error": "continue"}, schedule={"steps": 7})
        return train_tiny(changes, work_dir=folder, resume="", curves=True)
    finally:
        store.open_aside = open_aside


def test_a_run_whose_last_save_succeeds_is_a_success(ranks, saved, tmp_path):
    stage, folder = saved
    if stage == 2:
        shutil.copytree(folder, tmp_path / "run")
        printed = ranks.run(go_on_past_a_full_disk, 2, str(tmp_path / "run"))[0]["printed"]
        assert "No space left on device" in printed and printed.count("training goes on (run.on_save_error)") == 1
        assert "checkpoints (the newest of step 7)" in printed.splitlines()[-1]


def test_leftovers_of_killed_runs_are_cleaned_up_or_explained(ranks, saved, tmp_path):
    stage, folder = saved
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    shutil.copytree(folder, run)
    (checkpoints / "step-000004").rename(checkpoints / ".saving-step-000004")  # killed just before its last act
    for name in (".saving-step-000009", ".removing-step-000001", "set-aside-step-000005"):
        (checkpoints / name).mkdir()
    for path in (run / "config.json.part", run / "metrics.jsonl.part", checkpoints / "latest.part", run / "mine.part"):
        path.touch()
    printed = ranks.run(train_here, 2, settings("AdamW", stage, schedule={"steps": 5}), str(run))[0]["printed"]
    assert "resume" in printed and "step 4 of 5" in printed
    assert "kept    set-aside-step-000005 in" in printed and "delete them if you do not need them" in printed
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step-000004", "step-000005", "set-aside-step-000005", "latest"}
    assert [path.name for path in run.glob("*.part")] == ["mine.part"]  # not ours


def test_a_folder_in_use_is_refused_on_every_rank_and_free_again_when_its_run_is_killed(ranks, saved, tmp_path):
    stage, folder = saved
    shutil.copytree(folder, tmp_path / "run")
    code = "import sys, time; from pathlib import Path; from engine import folder_lock\n"
    code += "folder_lock.hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(100)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        changes = settings("AdamW", stage, schedule={"steps": 5})
        for start in (refused_resume, refused_start):
            answers = ranks.run(start, 2, changes, str(tmp_path / "run"))
            assert len(set(answers)) == 1, answers
            assert f"is in use by another run (host {socket.gethostname()}, process {other.pid}, since 20" in answers[0]
        assert find_checkpoint(tmp_path / "run").step == 4  # reading is allowed
    finally:
        other.kill()
        other.wait()
    assert ranks.run(train_here, 2, changes, str(tmp_path / "run"))[0]["records"][-1]["step"] == 5
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_checkpoint_that_the_run_removes_while_it_is_read_is_not_called_damaged(saved, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(Path(saved[1]) / "checkpoints", folder)
    (folder / "step-000003").rename(tmp_path / "next")
    read = Manifest.read

    def removed_meanwhile(path):
        if path.name == "step-000004" and path.exists():
            (tmp_path / "next").rename(folder / "step-000005")
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(Manifest, "read", removed_meanwhile)
    assert newest(folder, pytest.fail).folder == folder / "step-000005"


def refused_resume(changes: dict, folder: str) -> str:
    return refusal(lambda: train_here(changes, folder))


def refused_start(changes: dict, folder: str) -> str:
    return refusal(lambda: train_tiny(changes, work_dir=folder))


def refusal(start) -> str:
    from engine.errors import ConfigError

    try:
        start()
    except ConfigError as error:
        return str(error)
    return "not refused"


def without_room(policy: str) -> dict | str:
    """Not even a record fits on rank 0."""
    from engine import distributed
    from engine.errors import UserError
    from engine.monitoring.records import RecordFile

    write = RecordFile.write

    def full(self, record):
        with small_disk(1):
            write(self, record)

    RecordFile.write = full if distributed.rank() == 0 else write
    try:
        return train_tiny(settings("SGD", 2, run={"on_save_error": policy, "eval_interval": None, "draw": 0}))
    except UserError as error:
        return str(error)
    finally:
        RecordFile.write = write


def test_records_that_cannot_be_written_stop_the_run_or_do_not(ranks):
    stopped = ranks.run(without_room, 2, "stop")
    assert all("metrics.jsonl cannot be written: File too large" in text for text in stopped)
    going = ranks.run(without_room, 2, "continue")
    assert all("step-000006" in outcome["files"] for outcome in going)
    assert going[0]["printed"].count("training goes on") == 2  # said once of the steps, once of the evaluation


def test_a_folder_that_cannot_be_made_is_said(ranks, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(AssertionError, match="could not be written .*checkpoints: (File exists|Not a directory)"):
        ranks.run(train_here, 2, settings("SGD", 1), str(tmp_path))


def train_here(changes: dict, folder: str) -> dict:
    return train_tiny(changes, work_dir=folder, resume="")


def evaluated(changes: dict) -> dict:
    return train_tiny(merged({"run": {"eval_interval": 1.0, "draw": 0, "keep_last": 1, "ema": None}}, changes))


def test_the_best_is_kept_beside_the_last(ranks):
    outcome = ranks.run(evaluated_falling, 2, settings("SGD", 2, schedule={"steps": 9}))[0]
    folder = Path(outcome["folder"]) / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"step-000003", "step-000009", "latest", "best"}
    assert (folder / "best").read_text() == "step-000003" and (folder / "latest").read_text() == "step-000009"
    assert find_checkpoint(folder / "best").step == 3


def evaluated_falling(changes: dict) -> dict:
    """Evaluations whose metric falls."""
    from engine.train import after_step

    report = after_step.evaluate_and_report

    def falling(run, model, step, **options):
        from engine import distributed
        from engine.monitoring.records import RecordFile

        if distributed.rank() == 0:
            records = RecordFile(run.work_dir / "evaluations.jsonl")
            records.write({"step": step, "bbox_mAP": 1 / step})
            records.close()
        return {"bbox_mAP": 1 / step}

    after_step.evaluate_and_report = falling
    try:
        return evaluated(changes)
    finally:
        after_step.evaluate_and_report = report
