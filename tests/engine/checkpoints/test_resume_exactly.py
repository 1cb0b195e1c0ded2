"""An interrupted run and an uninterrupted one are the same, bit for bit: losses, weights, averages and all records."""

from __future__ import annotations

import pytest
from resumed_run import STEPS, assert_same_runs, compared, settings, straight_and_broken, straight_and_resumed


def stopped_twice(changes: dict) -> dict:
    return compared(*straight_and_broken(changes, [2, 4]))


@pytest.mark.parametrize("optimizer, stage", [("AGVMSGD", 0), ("AGVMAdamW", 2), ("PMDLAMB", 3)])
def test_a_run_that_is_stopped_twice_is_the_uninterrupted_one(ranks, optimizer, stage):
    for outcome in ranks.run(stopped_twice, 2, settings(optimizer, stage)):
        assert_same_runs(outcome, STEPS)


def resumed(changes: dict) -> dict:
    return compared(*straight_and_resumed(changes))


# AGVM's rules keep the moments of plain SGD and AdamW, and more. Plain ones: test_features_resume.py.
@pytest.mark.parametrize(
    "optimizer, stage",
    [
        *((o, s) for o in ("AGVMSGD", "AGVMAdamW") for s in range(4)),
        ("LARS", 1),
        ("LAMB", 2),
        ("AGVMLARS", 0),
        ("AGVMLAMB", 2),
    ],
)
def test_interrupted_is_uninterrupted(ranks, optimizer, stage):
    for outcome in ranks.run(resumed, 2, settings(optimizer, stage)):
        assert_same_runs(outcome, 4)
