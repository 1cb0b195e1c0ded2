"""The paper's first figure for any runs: the gradient variance of every module, and AGVM's factors below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.monitoring.curves import smoothed
from engine.monitoring.variance import Curve, Variances, by_seed, matched_end, title

LABELS = {"step": "optimizer step", "epoch": "epoch"}


def draw_variance(runs: Sequence[Variances], path: Path, *, axes: Sequence[str] = (), smooth: float = 0.0) -> Path:
    """One column per run; seeds of one run share it. `axes` shows all runs over the same steps, epochs, or both."""
    from matplotlib.figure import Figure  # here: only reports draw

    groups = by_seed(runs)
    modules = list(dict.fromkeys(module for run in runs for module in run.phi))
    colours = {module: f"C{index % 10}" for index, module in enumerate(modules)}
    kinds = ["phi", "effective", "mu"] if any(run.modulated for run in runs) else ["phi"]
    rows = [(axis, kind) for axis in axes or [""] for kind in kinds]
    figure = Figure(figsize=(4.4 * len(groups), 2.9 * len(rows) + 0.5), layout="constrained")
    panels = figure.subplots(len(rows), len(groups), squeeze=False, sharey="row")
    for (axis, kind), row in zip(rows, panels):
        for group, panel in zip(groups, row):
            end = matched_end(runs, axis) if axis else None
            for module in modules:
                curves = [curve for run in group for curve in [_curve(run, kind, module)] if curve]
                _draw(panel, curves, axis or "step", colours[module], module, smooth if kind != "mu" else 0.0)
            panel.set(xlabel=LABELS[axis or "step"], xlim=(0, end))
            if kind == "mu":
                panel.axhline(1.0, color="0.8", linewidth=0.8, zorder=0)
        row[0].set_ylim(bottom=0)  # for the whole row, after all of it is drawn
        row[0].set_ylabel(
            {"phi": "phi = 1 - cos", "effective": "mu$^2$ phi (of the step)", "mu": "mu, factor on the rate"}[kind]
        )
    for group, panel in zip(groups, panels[0]):
        panel.set_title(title(group), fontsize=10)
    # Some columns may lack a module, for example a head that only one pipeline has.
    named = {name: line for panel in panels[0] for line, name in zip(*panel.get_legend_handles_labels())}
    shown = [module for module in modules if module in named]
    panels[0, -1].legend([named[module] for module in shown], shown, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _curve(run: Variances, kind: str, module: str) -> Curve | None:
    if kind == "mu":
        return run.mu.get(module)
    if module not in run.phi:
        return None
    return run.phi[module] if kind == "phi" else run.effective(module)


def _draw(panel: Any, curves: Sequence[Curve], axis: str, colour: str, label: str, smooth: float) -> None:
    """One thin line for each seed; the first carries the module's name."""
    for number, curve in enumerate(curves):
        values = smoothed(curve.values, smooth) if smooth else curve.values
        panel.plot(
            curve.on(axis),
            values,
            color=colour,
            label=label if number == 0 else None,
            linewidth=1.0,
            alpha=1.0 if number == 0 else 0.55,
            marker="." if len(values) < 40 else None,
            markersize=4,
        )
