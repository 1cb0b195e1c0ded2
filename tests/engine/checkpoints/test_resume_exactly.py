"""An interrupted run and an uninterrupted one are the same, bit for bit: losses, weights and all records."""

from __future__ import annotations

import pytest
import torch
from tiny_run import merged, saved_weights, train_tiny

STEPS = 6  # with 10 images and batches of 4 an epoch has 3 steps: step 2 and 4 lie within one
OPTIMIZERS = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.05},
    "AGVMSGD": {"lr": 0.01, "momentum": 0.9, "tau": 2, "alpha": 0.5, "start_step": 0},
    "AGVMAdamW": {"lr": 1e-3, "tau": 2, "alpha": 0.5, "start_step": 0},
    "LARS": {"lr": 1.0, "weight_decay": 1e-4, "trust_coefficient": 0.01},
    "LAMB": {"lr": 0.01, "weight_decay": 0.05},
    "PMDLAMB": {"lr": 0.01, "weight_decay": 0.05, "period": 3, "factor": 0.2},
    "AGVMLARS": {"lr": 1.0, "weight_decay": 1e-4, "trust_coefficient": 0.01, "tau": 2, "alpha": 0.5, "start_step": 0},
    "AGVMLAMB": {"lr": 0.01, "weight_decay": 0.05, "tau": 2, "alpha": 0.5, "start_step": 0},
}
# What a step costs is no part of its result.
COSTS = ("images_per_second", "seconds", "memory_gb")


def settings(optimizer: str, stage: int, /, **changes) -> dict:
    return merged(
        changes,
        merged(
            {
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
                "schedule": {"steps": STEPS, "warmup_steps": 2, "decay": "cosine"},
                "run": {"checkpoint_interval": 1.0, "ema": 0.9},
            }
        ),
    )


def results(outcome: dict) -> list[dict]:
    return [{key: value for key, value in record.items() if key not in COSTS} for record in outcome["records"]]


def straight_and_broken(changes: dict, stops: list[int]) -> tuple[dict, dict]:
    """A run in one piece, and one that is stopped and resumed."""
    straight = train_tiny(changes)
    broken = train_tiny(changes, stop_after=stops[0])
    for stop in [*stops[1:], None]:
        broken = train_tiny(changes, work_dir=broken["folder"], resume="", stop_after=stop)
    return straight, broken


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


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


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
