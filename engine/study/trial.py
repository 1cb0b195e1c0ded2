"""One run of a study in this process, and its outcome on disk: a study goes on from the outcomes that are there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

from engine.config import RunConfig
from engine.errors import UserError
from engine.files import METRICS, write_json
from engine.monitoring.records import read_records
from engine.recipes.load import load_config
from engine.study.grid import Study, Trial, batch_settings, trial_config
from engine.zero.processes import init_distributed, reset_distributed

OUTCOME = "outcome.json"


class Outcome(NamedTuple):
    score: float  # not a number where the run diverged
    steps: int
    seconds: float  # of the whole run, evaluation included
    step_seconds: float  # median
    error: str | None = None  # why there is no score, other than divergence

    @property
    def diverged(self) -> bool:
        return math.isnan(self.score) and self.error is None


def read_outcome(folder: Path) -> Outcome | None:
    try:
        data = json.loads((folder / OUTCOME).read_text())
        return Outcome(**{**data, "score": math.nan if data["score"] is None else data["score"]})
    except (OSError, ValueError, TypeError, KeyError):  # cut off, or of another form: the trial is run again
        return None


def run_trial(study: Study, trial: Trial, folder: Path, start: Path | None) -> None:
    """Train and evaluate, with all output in a log beside the folder. A stopped trial left no outcome and begins anew."""
    if not parent_process().is_alive():  # the study was stopped while this process was being made
        return
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    score, error = math.nan, None
    try:
        with alone(folder):
            config = trial_config(study, trial, folder, images=training_images(study), start=start)
            score = _score(config, study.metric)
    except Exception as problem:  # told at the study's end; the other trials go on
        error = (
            None if isinstance(problem, _diverged()) else f"{type(problem).__name__}: {' '.join(str(problem).split())}"
        )
    records = read_records(folder / METRICS)
    if records and isinstance(
        records[-1]["loss"], str
    ):  # not a number, too late in the run to have been stopped for it
        score = math.nan
    step = statistics.median(record["seconds"] for record in records) if records else 0.0
    folder.mkdir(exist_ok=True)
    write_json(
        folder / OUTCOME,
        Outcome(score, len(records), time.monotonic() - began, step, error)._asdict()
        | {"score": None if math.isnan(score) else score},
    )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A process group of this process only, and its output in FOLDER.log, with the traceback of whatever ends it."""

    log = open(folder.parent / f"{folder.name}.log", "w", buffering=1)
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
    from engine.tasks.registry import task_of

    train, *_ = task_of(load_config(study.config, [*study.set, *batch_settings(study, study.batches[0])])).build_data()
    return len(train.dataset)


def _score(config: RunConfig, metric: str) -> float:
    from engine.train.loop import train

    metrics = train(config)
    if metric not in metrics:
        raise UserError(f'"{metric}" is not among the scores of this task: {", ".join(metrics)}')
    return metrics[metric]


def _diverged() -> type[Exception]:
    from engine.train.loop import Diverged

    return Diverged
