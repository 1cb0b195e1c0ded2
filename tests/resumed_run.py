"""Tiny runs that are saved, stopped and resumed: their settings, and what of them is compared."""

from __future__ import annotations

import tempfile

import torch
from tiny_run import TINY, merged, saved_weights, train_tiny

BATCH_NORM = {"detector": {"options": {**TINY["detector"]["options"], "backbone.norm_cfg": {"type": "BN"}}}}
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
COSTS = ("images_per_second", "seconds", "data_seconds", "memory_gb")


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
    """A run in one piece, and one that is stopped and resumed in its own folder."""
    straight = train_tiny(changes)
    broken = train_tiny(changes, stop_after=stops[0])
    for stop in [*stops[1:], None]:
        broken = train_tiny(changes, work_dir=broken["folder"], resume="", stop_after=stop)
    return straight, broken


def straight_and_resumed(changes: dict, steps: int = 4) -> tuple[dict, dict]:
    """A run in one piece that saves after every second step, and one that goes on from step 2 in another folder.

    Half the work of a run that is stopped: the same run is the one to compare with and the one to go on from.
    """
    changes = merged({"schedule": {"steps": steps}, "run": {"checkpoint_interval": 2 / 3, "keep_last": steps}}, changes)
    straight = train_tiny(changes)
    return straight, go_on(changes, f"{straight['folder']}/checkpoints/step-000002")


def go_on(changes: dict, checkpoint: str) -> dict:
    """Resume a checkpoint in a new work dir."""
    from engine import distributed

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    return train_tiny(changes, work_dir=work_dir, resume=checkpoint)


def compared(straight: dict, other: dict) -> dict:
    """What must be the same of two runs, as pairs; and the folder of the second."""
    averages = [saved_weights(outcome["folder"], ema=True)[0] for outcome in (straight, other)]
    return {
        "records": [results(straight), results(other)],
        "mu": [straight["mu"], other["mu"]],
        "weights": [straight["weights"], other["weights"]],
        "averages": averages,
        "folder": other["folder"],
    }


def assert_same_runs(outcome: dict, steps: int) -> None:
    first, second = outcome["records"]
    assert first == second and [record["step"] for record in second] == list(range(1, steps + 1))
    assert outcome["mu"][0] == outcome["mu"][1]
    assert same(*outcome["weights"])
    assert same(*outcome["averages"])
    assert not same(outcome["weights"][0], outcome["averages"][0])


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
