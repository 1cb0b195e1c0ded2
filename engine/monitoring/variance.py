"""Gradient variance per module over the run, and AGVM's factors beneath: the paper's first figure for one's own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

from engine.config.errors import UserError
from engine.monitoring.curves import smoothed
from engine.monitoring.records import read_records


def _series(records: Sequence[dict[str, Any]], key: str) -> dict[str, tuple[list[int], list[float]]]:
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for module, value in record.get(key, {}).items():
            if isinstance(value, (int, float)):
                steps, values = series.setdefault(module, ([], []))
                steps.append(record["step"])
                values.append(value)
    return series


def draw_variance(runs: Sequence[Path], path: Path, *, smooth: float = 0.0) -> Path:
    """One column per run: phi = 1 - cos of every module above, mu below, over optimizer steps."""
    from matplotlib.figure import Figure

    measured = []
    for run in runs:
        records = read_records(run / "metrics.jsonl")
        if not any("phi" in record for record in records):
            raise UserError(f"{run} holds no gradient variances: train it with AGVMSGD or AGVMAdamW "
                            "(tau within the run's length)")
        measured.append(records)
    figure = Figure(figsize=(5.2 * len(runs), 6), layout="constrained")
    axes = figure.subplots(2, len(runs), squeeze=False, sharex="col")
    modules = list(dict.fromkeys(m for records in measured for r in records for m in r.get("phi", {})))
    colours = {module: f"C{index % 10}" for index, module in enumerate(modules)}
    for column, (run, records) in enumerate(zip(runs, measured)):
        top, bottom = axes[:, column]
        for module, (steps, values) in _series(records, "phi").items():
            top.plot(steps, smoothed(values, smooth) if smooth else values, color=colours[module], label=module,
                     marker="." if len(steps) < 40 else None)
        for module, (steps, values) in _series(records, "mu").items():
            bottom.plot(steps, values, color=colours.get(module, "0.5"), label=module)
        top.set(title=run.resolve().name, ylim=(0, None))
        bottom.set(xlabel="optimizer step")
        bottom.axhline(1.0, color="0.8", linewidth=0.8, zorder=0)
    axes[0, 0].set_ylabel("gradient variance phi = 1 - cos")
    axes[1, 0].set_ylabel("factor mu on the learning rate")
    axes[0, -1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
