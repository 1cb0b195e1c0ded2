"""AGVM from the JSON: measured, recorded, drawn, and the same on one rank as on two."""

from pathlib import Path

import pytest
from tiny_run import distance, train_tiny

from engine.monitoring.variance import read_variances
from engine.monitoring.variance_picture import draw_variance

AGVM = {
    "optimizer": {
        "type": "AGVMSGD",
        "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4, "tau": 2, "alpha": 0.5},
    },
    "schedule": {"steps": 6, "warmup_steps": 2, "decay": "constant"},
}


def run(changes):
    return train_tiny({**AGVM, **changes})


@pytest.fixture(scope="module")
def single(ranks):
    return ranks.run(run, 1, {})[0]


def test_windows_begin_after_the_warm_up_and_are_recorded(single):
    measured = {record["step"]: record["phi"] for record in single["records"] if "phi" in record}
    assert list(measured) == [4, 6]  # steps above the two of warm-up that tau divides
    assert all(
        set(phi) == {"backbone", "neck", "bbox_head"} and all(0 <= v <= 2 for v in phi.values())
        for phi in measured.values()
    )
    first = single["records"][3]
    expected = 0.5 + 0.5 * min(10, max(0.1, (first["phi"]["backbone"] / first["phi"]["neck"]) ** 0.5))
    assert first["mu"]["neck"] == pytest.approx(expected, rel=1e-9)
    assert single["records"][2]["mu"] == {"backbone": 1.0, "neck": 1.0, "bbox_head": 1.0}


@pytest.mark.parametrize("world,stage", [(2, 2), (2, 3), (4, 1)])
def test_one_rank_and_several_measure_the_same(ranks, single, world, stage):
    other = ranks.run(run, world, {"zero_optimization": {"stage": stage}})[0]
    for mine, theirs in zip(single["records"], other["records"]):
        for key in ("phi", "mu"):
            assert mine.get(key, {}) == pytest.approx(theirs.get(key, {}), rel=1e-4)
    assert distance(single["weights"], other["weights"]) < 1e-5


def test_a_runs_own_records_are_drawn(single, tmp_path):
    run = read_variances(Path(single["folder"]))
    assert list(run.phi) == ["backbone", "neck", "bbox_head"] and run.modulated and run.steps == len(single["records"])
    assert draw_variance([run], tmp_path / "picture.png", axes=["step", "epoch"]).exists()
