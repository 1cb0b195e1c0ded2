"""The pictures of a study: scores over the batch, and the gradient variances of its AGVM runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from engine.files import METRICS
from engine.monitoring.records import read_records
from engine.monitoring.variance import read_variances
from engine.monitoring.variance_picture import draw_variance
from engine.study.grid import Study, Trial
from engine.study.results import Cell


def draw_scores(study: Study, rows: Sequence[str], found: dict[tuple[str, int], Cell], path: Path) -> Path:
    """One line per method with a bar from the worst to the best seed, and a cross at zero if a run diverged."""
    from matplotlib.figure import Figure  # here: only reports draw

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(rows):
        own = [found[method, batch] for batch in study.batches if (method, batch) in found]
        colour, style = f"C{number % 10}", "-" if "AGVM" in method else "--"
        # Shifted on the logarithmic axis, so that bars do not hide each other.
        shift = 2 ** (0.05 * (number - (len(rows) - 1) / 2))
        own = [cell for cell in own if not cell.errors]  # a failed run says nothing about its method
        # The mean is NaN if a seed diverged: the line has a gap there.
        axes.errorbar(
            [cell.batch * shift for cell in own],
            [cell.mean for cell in own],
            yerr=[cell.spread for cell in own],
            color=colour,
            linestyle=style,
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=method,
        )
        diverged = [cell.batch * shift for cell in own if math.isnan(cell.mean)]
        axes.plot(diverged, [0.0] * len(diverged), color=colour, linestyle="", marker="x")
    axes.set_xscale("log", base=2)
    axes.set_xticks(study.batches, [str(batch) for batch in study.batches])
    axes.axvline(study.knee, color="0.85", zorder=0)
    axes.set(
        xlabel=f"batch (learning rates grow linearly up to {study.knee}; x: diverged)",
        ylabel=study.metric,
        title=f"{study.epochs:g} epochs at every batch, best of {len(study.sweep)} learning rates, "
        f"{len(study.seeds)} seeds",
        ylim=(-0.02, None),
    )
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)
    return path


def draw_variances(study: Study, found: dict[tuple[str, int], Cell], folder: Path) -> list[Path]:
    """For every AGVM method, its runs at the smallest and the largest batch over the same epochs."""
    pictures = []
    for method in dict.fromkeys(method for method, _ in found if study.methods[method].type.startswith("AGVM")):
        ends = [
            found[method, batch] for batch in sorted({study.batches[0], study.batches[-1]}) if (method, batch) in found
        ]
        runs = [folder / Trial(method, cell.batch, cell.factor, seed).name for cell in ends for seed in study.seeds]
        measured = [read_variances(run) for run in runs if any("phi" in r for r in read_records(run / METRICS))]
        if measured:
            pictures.append(draw_variance(measured, folder / f"variance-{method}.png", axes=["epoch"], smooth=0.5))
    return pictures
