"""The achievable share of a card's peaks from a run that was made on it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from engine.config.batch import KEYS
from engine.errors import UserError
from engine.files import CONFIG, METRICS
from engine.monitoring.records import read_records
from engine.planning.hardware import Hardware
from engine.planning.plan import Plan
from engine.planning.time import calibrated
from engine.recipes.load import load_config

_FIRST = 5  # steps in which libraries are loaded and kernels are chosen


def measured_step(folder: str) -> float:
    """The median seconds of a step of a run, its first steps left out."""
    path = Path(folder) / METRICS
    if not path.is_file():
        raise UserError(f"--calibrate {folder}: there is no metrics.jsonl in it: give the work dir of a run")
    seconds = [record["seconds"] for record in read_records(path) if "seconds" in record]
    if not seconds:
        raise UserError(f"--calibrate {folder}: its metrics.jsonl has no step yet: let the run make some steps first")
    return statistics.median(seconds[_FIRST:] or seconds)


def calibrate_from_run(folder: str, hardware: Hardware, **given: Any) -> Hardware:
    """From the run's own saved config, whatever is planned now; `given` is what `Plan` is told of data that is elsewhere."""
    path = Path(folder) / CONFIG
    step = measured_step(folder)
    if not path.is_file():
        raise UserError(f"--calibrate {folder}: there is no config.json in it: give the work dir of a run")
    config = load_config(str(path))
    total, micro, accumulation = (config.deepspeed.get(key) for key in KEYS)
    return calibrated(Plan(config, total // (micro * accumulation), **given), hardware, step)
