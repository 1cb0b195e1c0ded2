"""Draw the curves of a run (loss, learning rate, scores) from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.files import CURVES, EVALUATIONS, METRICS
from engine.monitoring.records import read_records

_SCORES = ("bbox_mAP", "bbox_mAP_50", "segm_mAP", "segm_mAP_50", "PQ", "mIoU", "accuracy_top1", "accuracy_top5")


def _numbers(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """The exponential moving average, corrected for its start at zero."""
    smooth, average, norm = [], 0.0, 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        smooth.append(average / norm)
    return smooth


def draw_curves(work_dir: Path) -> Path:
    """`curves.png`: the loss and its parts, the learning rate, and each evaluation's metrics."""
    from matplotlib.figure import Figure  # here: only reports draw

    steps = read_records(work_dir / METRICS)
    evaluations = read_records(work_dir / EVALUATIONS)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss_axes, rate_axes, score_axes = figure.subplots(1, 3)
    x, y = _numbers(steps, "loss")
    loss_axes.plot(x, y, color="0.8", linewidth=0.8)
    loss_axes.plot(x, smoothed(y), label="loss")
    parts = [key for key in (steps[-1] if steps else {}) if "loss" in key and key != "loss"]
    for key in parts:
        px, py = _numbers(steps, key)
        loss_axes.plot(px, smoothed(py), linewidth=0.9, label=key)
    loss_axes.set(title="training loss", xlabel="optimizer step", ylim=(0, None))
    if y:
        loss_axes.legend(fontsize=7)
    rate_axes.plot(*_numbers(steps, "lr"), color="tab:orange")
    rate_axes.set(title="learning rate", xlabel="optimizer step", ylim=(0, None))
    names = [key for key in _SCORES if any(key in record for record in evaluations)]
    for key in names:
        x, y = _numbers(evaluations, key)
        share = [value / 100 for value in y] if key in ("PQ", "mIoU") else y  # those two are in percent
        score_axes.plot(x, share, marker="o", markersize=3, label=key)
    score_axes.set(title="validation", xlabel="optimizer step", ylim=(0, 1))
    if names:
        score_axes.legend(fontsize=7)
    path = work_dir / CURVES
    figure.savefig(path, dpi=110)
    return path
