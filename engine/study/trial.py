"""One run of a study in this process, and its outcome on disk. A study continues from the outcomes on disk."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

from engine.errors import UserError
from engine.files import METRICS, write_json
from engine.monitoring.records import read_records
from engine.recipes.load import load_config
from engine.study.grid import Study, Trial, batch_settings, trial_config
from engine.tasks.registry import task_of
from engine.train.loop import Diverged, train
from engine.zero.processes import init_distributed, reset_distributed

OUTCOME = "outcome.json"


class Outcome(NamedTuple):
    score: float  # NaN if the run diverged
    steps: int
    seconds: float  # of the whole run, with evaluation
    step_seconds: float  # median
    error: str | None = None  # why there is no score, if not because of divergence

    @property
    def diverged(self) -> bool:
        return math.isnan(self.score) and self.error is None


def read_outcome(folder: Path) -> Outcome | None:
    try:
        data = json.loads((folder / OUTCOME).read_text())
        return Outcome(**{**data, "score": math.nan if data["score"] is None else data["score"]})
    except (OSError, ValueError, TypeError, KeyError):  # incomplete or in another form: the trial is run again
        return None


def is_orphan() -> bool:
    """Whether the study was stopped while this process was being started."""
    parent = parent_process()
    return parent is None or not parent.is_alive()


def end_with_study() -> None:
    """End this process with the study's, also if that is killed: the next study wants the folder of this trial."""
    parent = parent_process()
    assert parent is not None, "a trial is started by a study"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with the study", daemon=True).start()


def run_trial(study: Study, trial: Trial, folder: Path, start: Path | None) -> None:
    """Train and evaluate, with all output in a log beside the folder. A stopped trial starts from scratch."""
    if is_orphan():
        return
    end_with_study()
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    score, error = math.nan, None
    try:
        with alone(folder):
            metrics = train(trial_config(study, trial, folder, images=training_images(study), start=start))
            if study.metric not in metrics:
                raise UserError(f'"{study.metric}" is not among the scores of this task: {", ".join(metrics)}')
            score = metrics[study.metric]
    except Diverged:
        pass
    except Exception as problem:  # reported at the study's end; the other trials continue
        error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    records = read_records(folder / METRICS)
    if records and isinstance(records[-1]["loss"], str):  # NaN, but too late in the run to have stopped it
        score = math.nan
    step = statistics.median(record["seconds"] for record in records) if records else 0.0
    folder.mkdir(exist_ok=True)
    outcome = Outcome(score, len(records), time.monotonic() - began, step, error)
    write_json(folder / OUTCOME, {**outcome._asdict(), "score": None if math.isnan(score) else score})


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group with this process only. Its output goes to FOLDER.log, with the traceback of any exception."""
    with open(folder.parent / f"{folder.name}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with tempfile.TemporaryDirectory() as meeting:
        init_distributed(init_method=f"file://{meeting}/store", rank=0, world_size=1)
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
        finally:
            reset_distributed()


def training_images(study: Study) -> int:
    split, *_ = task_of(load_config(study.config, [*study.set, *batch_settings(study, study.batches[0])])).build_data()
    return len(split.dataset)
