"""The report of a study, written from the outcomes on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.study.figures import draw_scores, draw_variances
from engine.study.grid import Study, shared_runs
from engine.study.page import write_page
from engine.study.results import as_csv, cells, grid_of, markdown, rows_of
from engine.study.runner import Outcomes


def write_report(study: Study, rows: Sequence[str], outcomes: Outcomes, folder: Path) -> str:
    """Write `results.csv`, `results.md`, `scores.png`, `variance-*.png`, `study.html`; returns the short table."""
    found = cells(study, rows, outcomes)
    baseline = next((method for method in rows if study.methods[method].type == "AdamW"), rows[0])
    grid, table = grid_of(study, rows, found), rows_of(study, found, baseline)
    summary = [
        f"{study.metric} of the validation images after {study.epochs:g} epochs: mean over {len(study.seeds)} seeds, "
        "+- half of the distance between the best and the worst seed. NaN: the loss was not finite.",
        f"Every method had the same budget: {len(study.sweep)} learning rates around the paper's rule (linear to batch "
        f"{study.knee}) were tried with seed {study.seeds[0]} at full length at every batch, and the best was run with "
        "the other seeds. AGVM's tau and alpha follow from the length of the run and were not tuned.",
        "Seconds were measured with several runs at once on one machine; the last column is the median time of a step "
        f"relative to {baseline}'s.",
    ]
    summary += [
        f"{method} at batch {', '.join(map(str, batches))} is {other}'s run: there both have the same settings."
        for (method, other), batches in shared_runs(study, rows).items()
    ]
    (folder / "results.csv").write_text(as_csv(table))
    (folder / "results.md").write_text("\n\n".join([*summary, markdown(grid), markdown(table)]) + "\n")
    pictures = [draw_scores(study, rows, found, folder / "scores.png"), *draw_variances(study, found, folder)]
    write_page(
        folder / "study.html",
        title=f"Large batches: {study.config}",
        summary=summary,
        grid=grid,
        pictures=pictures,
        table=table,
        settings=study.model_dump_json(indent=2),
    )
    return markdown(grid)
