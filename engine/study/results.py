"""The results of a study: a cell for every method and batch, and tables of them."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.study.grid import Study
from engine.study.runner import Outcomes, best_trial


@dataclass(frozen=True)
class Cell:
    method: str
    batch: int
    lr: float
    factor: float
    scores: list[float]  # of each seed at the best learning rate; NaN if the run diverged
    swept: dict[float, str]  # factor -> score of the first seed, or why there is none
    steps: int
    seconds: float
    step_seconds: float
    errors: list[str]

    @property
    def mean(self) -> float:
        """NaN if any seed diverged."""
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float:
        """Half of the distance between the best and the worst seed."""
        return (max(self.scores) - min(self.scores)) / 2

    def text(self) -> str:
        if self.errors:
            return "failed"
        if math.isnan(self.mean):
            diverged = sum(math.isnan(score) for score in self.scores)
            return "NaN" if diverged == len(self.scores) else f"NaN ({diverged} of {len(self.scores)})"
        return f"{self.mean:.3f} +- {self.spread:.3f}"


def cells(study: Study, rows: Sequence[str], outcomes: Outcomes) -> dict[tuple[str, int], Cell]:
    """The cells for which the outcomes of all seeds are there."""
    found = {}
    for method in rows:
        for batch in study.batches:
            swept = {
                t.factor: o
                for t, o in outcomes.items()
                if (t.method, t.batch, t.seed) == (method, batch, study.seeds[0])
            }
            if any(factor not in swept for factor in study.sweep):
                continue
            best = best_trial(study, method, batch, outcomes)
            chosen = [outcomes[trial] for seed in study.seeds if (trial := best._replace(seed=seed)) in outcomes]
            if len(chosen) < len(study.seeds):
                continue
            found[method, batch] = Cell(
                method,
                batch,
                study.rate(method, batch) * best.factor,
                best.factor,
                [o.score for o in chosen],
                {factor: "failed" if o.error else _number(o.score) for factor, o in sorted(swept.items())},
                chosen[0].steps,
                statistics.fmean(o.seconds for o in chosen),
                statistics.median(o.step_seconds for o in chosen),
                [o.error for o in chosen if o.error],
            )
    return found


def relative_cost(found: dict[tuple[str, int], Cell], cell: Cell, baseline: str) -> float:
    """Seconds per step, relative to the baseline's at the same batch."""
    base = found.get((baseline, cell.batch))
    return cell.step_seconds / base.step_seconds if base and base.step_seconds else math.nan


def rows_of(study: Study, found: dict[tuple[str, int], Cell], baseline: str) -> list[list[str]]:
    """The long table, heading first."""
    table = [
        ["method", "batch", study.metric, "seeds", "lr", "x rule", "sweep", "steps", "seconds", f"step / {baseline}"]
    ]
    for cell in found.values():
        table.append(
            [
                cell.method,
                str(cell.batch),
                cell.text(),
                " ".join(_number(score) for score in cell.scores),
                f"{cell.lr:.3g}",
                f"{cell.factor:g}",
                " ".join(f"x{factor:g}: {score}" for factor, score in cell.swept.items()),
                str(cell.steps),
                f"{cell.seconds:.0f}",
                _number(relative_cost(found, cell, baseline)),
            ]
        )
    return table


def grid_of(study: Study, rows: Sequence[str], found: dict[tuple[str, int], Cell]) -> list[list[str]]:
    """The short table: a row per method, a column per batch."""
    return [
        ["method", *(f"batch {batch}" for batch in study.batches)],
        *(
            [method, *(found[method, batch].text() if (method, batch) in found else "" for batch in study.batches)]
            for method in rows
        ),
    ]


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([head, "|" + "---|" * len(table[0]), *body])


def as_csv(table: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(table)
    return text.getvalue()


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.3f}"
