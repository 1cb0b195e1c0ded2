"""Gradient variances of finished runs, read from their records and put on a common axis.

A window measures phi = 1 - cos. mu^2 phi is the variance of the step that the module takes, in units of the learning
rate. AGVM makes mu^2 phi equal for all modules.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files import CONFIG, METRICS
from engine.monitoring.records import read_records

AXES = ("step", "epoch")


@dataclass(frozen=True)
class Curve:
    """One module's values over a run, one for each window."""

    steps: list[int]
    epochs: list[float]
    values: list[float]

    def on(self, axis: str) -> Sequence[float]:
        return self.steps if axis == "step" else self.epochs


@dataclass(frozen=True)
class Variances:
    """The measurements of one run for each module, in the order of the network."""

    run: Path
    anchor: str
    phi: dict[str, Curve]
    mu: dict[str, Curve]
    steps: int
    epochs: float

    def end(self, axis: str) -> float:
        return self.steps if axis == "step" else self.epochs

    @property
    def modulated(self) -> bool:
        return any(value != 1 for curve in self.mu.values() for value in curve.values)

    def effective(self, module: str) -> Curve:
        """mu^2 phi, with the mu that was used in the window's step."""
        phi, factor = self.phi[module], dict(zip(self.mu[module].steps, self.mu[module].values))
        return Curve(phi.steps, phi.epochs, [factor[s] ** 2 * value for s, value in zip(phi.steps, phi.values)])


def read_variances(run: Path) -> Variances:
    records = read_records(run / METRICS)
    phi = _curves(records, "phi")
    if not phi:  # also if none of them was a finite number
        raise UserError(
            f"{run} holds no gradient variances: train it with AGVMSGD or AGVMAdamW "
            "(tau within the run's length; clip [1, 1] measures without modulating)"
        )
    anchor = _config(run).get("optimizer", {}).get("params", {}).get("anchor", "backbone")
    anchor = anchor if anchor in phi else next(iter(phi))
    return Variances(run, anchor, phi, _curves(records, "mu"), records[-1]["step"], records[-1]["epoch"])


def by_seed(runs: Sequence[Variances]) -> list[list[Variances]]:
    """Group runs that differ only in their seed."""
    groups: dict[str, list[Variances]] = {}
    for run in runs:
        config = _config(run.run)
        if config:
            ignored = {"seed", "work_dir"}
            config["run"] = {key: value for key, value in config.get("run", {}).items() if key not in ignored}
        groups.setdefault(json.dumps(config, sort_keys=True) if config else str(run.run), []).append(run)
    return list(groups.values())


def title(runs: Sequence[Variances]) -> str:
    """The folder's name; for several seeds, the common part of their names."""
    names = [run.run.resolve().name for run in runs]
    if len(names) == 1:
        return names[0]
    common = os.path.commonprefix(names).rstrip("-_. ").removesuffix("seed").rstrip("-_. ")
    return f"{common or names[0]} ({len(names)} seeds)"


def matched_end(runs: Sequence[Variances], axis: str) -> float:
    """The end of the shortest run, in steps or epochs. UserError if a run has no measurement before that."""
    end = min(run.end(axis) for run in runs)
    for run in runs:
        first = min(curve.on(axis)[0] for curve in run.phi.values())
        if first > end:
            raise UserError(
                f"{run.run} has its first gradient variance at {axis} {first:g}, after the end of the shortest run "
                f"({end:g}): train it with optimizer.params.start_step=0, or leave the matched {axis}s out"
            )
    return end


def summary(groups: Sequence[Sequence[Variances]], axis: str = "step", end: float = math.inf) -> str:
    """A table of the second half of every run (up to `end`): phi and mu^2 phi of each module, also relative to the
    anchor's."""
    lines = [f"{'run':32} {'module':12} {'phi':>8} {'/ anchor':>9} {'mu^2 phi':>9} {'/ anchor':>9}"]
    for group in groups:
        means = {
            module: (
                _late_mean([run.phi[module] for run in group if module in run.phi], axis, end),
                _late_mean([run.effective(module) for run in group if module in run.phi], axis, end),
            )
            for module in group[0].phi
        }
        phi_anchor, effective_anchor = means[group[0].anchor]
        name = title(group)
        for module, (phi, effective) in means.items():
            lines.append(
                f"{name:32} {module:12} {phi:8.4f} {phi / phi_anchor:9.2f} {effective:9.4f} "
                f"{effective / effective_anchor:9.2f}"
            )
            name = ""
    return "\n".join(lines)


def _late_mean(curves: Sequence[Curve], axis: str, end: float) -> float:
    """Geometric mean over the windows of the second half and over all seeds."""
    logs = []
    for curve in curves:
        x = [position for position in curve.on(axis) if position <= end]
        logs += [
            math.log(value) for position, value in zip(x, curve.values) if position >= (x[0] + x[-1]) / 2 and value > 0
        ]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _curves(records: Sequence[dict[str, Any]], key: str) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in records:
        for module, value in record.get(key, {}).items():
            if isinstance(value, (int, float)):
                curve = curves.setdefault(module, Curve([], [], []))
                curve.steps.append(record["step"])
                curve.epochs.append(record["epoch"])
                curve.values.append(value)
    return curves


def _config(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / CONFIG).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
