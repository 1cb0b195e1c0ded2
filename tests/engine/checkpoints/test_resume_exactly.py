"""An interrupted run and an uninterrupted one are the same, bit for bit: losses, weights and all records."""

from __future__ import annotations

import pytest
from resumed_run import STEPS, results, same, settings, straight_and_broken
from tiny_run import saved_weights


def compare(changes: dict, stops: list[int]) -> dict:
    straight, broken = straight_and_broken(changes, stops)
    assert results(straight) == results(broken)
    assert straight["mu"] == broken["mu"]
    first, second = (saved_weights(o["folder"], ema=True)[0] for o in (straight, broken))
    return {
        "weights": [straight["weights"], broken["weights"]],
        "averages": [first, second],
        "steps": [record["step"] for record in broken["records"]],
    }


# AGVM's rules keep the moments of plain SGD and AdamW, and more.
@pytest.mark.parametrize(
    "optimizer, stage",
    [
        *((o, s) for o in ("AGVMSGD", "AGVMAdamW") for s in range(4)),
        ("SGD", 2),
        ("AdamW", 3),
        ("LARS", 1),
        ("LAMB", 2),
        ("PMDLAMB", 3),
        ("AGVMLARS", 0),
        ("AGVMLAMB", 2),
    ],
)
def test_interrupted_is_uninterrupted(ranks, optimizer, stage):
    for outcome in ranks.run(compare, 2, settings(optimizer, stage), [2, 4]):
        assert outcome["steps"] == list(range(1, STEPS + 1))
        assert same(*outcome["weights"])
        assert same(*outcome["averages"])
        assert not same(outcome["weights"][0], outcome["averages"][0])
