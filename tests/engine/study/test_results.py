"""From outcomes to tables, pictures and the page."""

import json
import math

import pytest
from test_grid import outcome, study

from engine.study.grid import Trial
from engine.study.report import write_report
from engine.study.results import cells, grid_of, markdown
from engine.study.trial import read_outcome


@pytest.fixture
def outcomes():
    found = {}
    for batch, scores in ((8, {0.5: 0.3, 1: 0.4, 2: 0.1}), (32, {0.5: 0.2, 1: math.nan, 2: math.nan})):
        for factor, score in scores.items():
            found[Trial("SGD", batch, factor, 0)] = outcome(score)
    found[Trial("SGD", 8, 1, 1)] = outcome(0.5)
    found[Trial("SGD", 32, 0.5, 1)] = outcome(math.nan)
    found[Trial("MegDet", 8, 1, 0)] = outcome(0.4)  # its sweep is not complete: no cell
    return found


def test_cells_are_of_all_seeds_at_the_best_rate(outcomes):
    found = cells(study(batches=[8, 32]), ["SGD", "MegDet"], outcomes)
    assert list(found) == [("SGD", 8), ("SGD", 32)]
    cell = found["SGD", 8]
    assert cell.scores == [0.4, 0.5] and cell.mean == pytest.approx(0.45) and cell.spread == pytest.approx(0.05)
    assert cell.lr == pytest.approx(0.02) and cell.swept == {0.5: "0.300", 1: "0.400", 2: "0.100"}
    assert cell.text() == "0.450 +- 0.050" and found["SGD", 32].text() == "NaN (1 of 2)"


def test_the_report_is_written_from_what_is_there(outcomes, tmp_path):
    text = write_report(study(batches=[8, 32]), ["SGD", "MegDet"], outcomes, tmp_path)
    assert text == markdown(
        grid_of(study(batches=[8, 32]), ["SGD", "MegDet"], cells(study(batches=[8, 32]), ["SGD", "MegDet"], outcomes))
    )
    assert "| SGD | 0.450 +- 0.050 | NaN (1 of 2) |" in text and "| MegDet |  |  |" in text
    page = (tmp_path / "study.html").read_text()
    assert (
        "MegDet at batch 8, 32 is SGD&#x27;s run" in page
        and "0.450 +- 0.050" in page
        and page.count("data:image/png;base64,") == 1
        and "src='http" not in page
    )
    assert (tmp_path / "scores.png").stat().st_size > 5000
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert len(rows) == 3 and rows[1].startswith("SGD,8,0.450 +- 0.050,0.400 0.500,0.02,1,")


def test_a_failed_run_is_no_divergence_and_costs_no_report(tmp_path):
    failed = outcome(math.nan)._replace(error="DataError: broken", steps=0)
    found = {Trial("AGVM", 8, factor, 0): failed for factor in (0.5, 1, 2)} | {Trial("AGVM", 8, 0.5, 1): failed}
    assert not failed.diverged and outcome(math.nan).diverged
    assert "| AGVM | failed |" in write_report(study(batches=[8]), ["AGVM"], found, tmp_path)
    assert "x0.5: failed x1: failed x2: failed" in (tmp_path / "results.csv").read_text()


def test_an_outcome_that_was_cut_off_is_none(tmp_path):
    whole = json.dumps({"score": None, "steps": 3, "seconds": 1.0, "step_seconds": 0.1, "error": None})
    for text, is_there in ((whole, True), (whole[:20], False), ("{}", False), ("[1]", False)):
        (tmp_path / "outcome.json").write_text(text)
        assert (read_outcome(tmp_path) is not None) == is_there, text
