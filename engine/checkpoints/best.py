"""The best step so far. It is computed from the recorded evaluations, so no second file can disagree with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.checkpoints import store
from engine.errors import ConfigError, nearest


def metric_name(setting: str, metrics: Sequence[str]) -> str:
    """The metric that decides; `auto` is the first one of an evaluation, as in mmdet."""
    if setting == "auto":
        return next(iter(metrics))
    if setting not in metrics:
        raise ConfigError(
            f'run.keep_best is "{setting}", which is none of the metrics {", ".join(metrics)}'
            f"{nearest(setting, metrics)}"
        )
    return setting


def best_step(evaluations: Sequence[dict[str, Any]], setting: str | None) -> int | None:
    """The step with the highest value of the metric (the first if several are equal); None without evaluations."""
    if setting is None or not evaluations:
        return None
    name = metric_name(setting, [key for key in evaluations[0] if key != "step"])
    scored = [(e["step"], e[name]) for e in evaluations if isinstance(e.get(name), (int, float))]
    return max(scored, key=lambda pair: pair[1])[0] if scored else None


def mark_best(folder: Path, step: int) -> None:
    """Write the tag of the best checkpoint to `best`, next to DeepSpeed's `latest`."""
    store.write_tag(folder / store.BEST, store.tag_of(step))
