"""A checkpoint that cannot be written: all ranks say so, older ones stay, the run stops or continues as configured."""

from __future__ import annotations

import contextlib
import resource
import shutil
from pathlib import Path

import pytest
from resumed_run import settings
from tiny_run import merged, train_tiny

from engine.checkpoints.finding import find_checkpoint


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
    outcome = ranks.run(go_on, 2, str(tmp_path / "run"), "continue", stage, 1)[0]
    assert [record["step"] for record in outcome["records"]] == [1, 2, 3, 4, 5, 6]
    assert outcome["printed"].count("training goes on (run.on_save_error)") == 1
    assert find_checkpoint(tmp_path / "run").step == 4


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
