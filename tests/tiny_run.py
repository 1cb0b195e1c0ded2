"""Runs of a few steps on a few small images: the config, and a function for worker ranks."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

TINY = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 0},
    "detector": {"config": "tiny_retinanet", "options": {
        "backbone.base_channels": 8, "backbone.norm_cfg": {"type": "GN", "num_groups": 4},
        "neck.in_channels": [8, 16, 32, 64], "neck.out_channels": 16, "bbox_head.in_channels": 16,
        "bbox_head.feat_channels": 16, "bbox_head.stacked_convs": 1,
        "bbox_head.norm_cfg.num_groups": 4}},
    "data": {"dataset": "shapes", "shapes": {"train_images": 10, "val_images": 5, "image_size": 96},
             "scale": [96, 96], "train_scales": [[80, 80], [112, 112]], "workers": 0},
    # SGD for exact comparisons: Adam divides gradients of rounding size by their own size.
    "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}},
    "schedule": {"steps": 3, "warmup_steps": 1, "decay": "constant"},
    "run": {"seed": 3, "eval_interval": 0, "checkpoint_interval": 0},
}


def merged(changes: dict[str, Any], base: dict[str, Any] = TINY) -> dict[str, Any]:
    """A copy of `base` with nested changes; options and optimizer params are replaced as a whole."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict) and key not in ("options", "params"):
            result[key] = merged(value, result[key])
        else:
            result[key] = copy.deepcopy(value)
    return result


def train_tiny(changes: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank's process group; weights (whole), records, and what the work dir holds."""
    import contextlib
    import io

    from engine import distributed, training
    from engine.config import parse_config
    from engine.zero.whole_parameters import whole_state

    kept: dict[str, Any] = {}
    build = training.build_run

    def keep(config: Any) -> Any:
        kept["run"] = build(config)
        return kept["run"]

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    training.build_run = keep
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            metrics = training.train(parse_config(merged({"run": {"work_dir": work_dir}}, merged(changes))))
    finally:
        training.build_run = build
    run = kept["run"]
    weights = {name: value.float().clone() for name, value in whole_state(run.engine.module)}
    # `destroy` is what takes ZeRO's hooks off the process before the next run in it.
    run.engine.destroy()
    folder = Path(work_dir)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"weights": weights, "records": records, "metrics": metrics, "folder": work_dir,
            "files": sorted(p.name for p in folder.rglob("*"))}


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The greatest difference of any weight, relative to the greatest weight of its tensor."""
    assert first.keys() == second.keys()
    return max(float((first[n] - second[n]).abs().max() / first[n].abs().max().clamp(min=1e-12)) for n in first)


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Euclidean and relative over all weights: for runs in which single small weights may be off."""
    apart = sum(float((first[n] - second[n]).square().sum()) for n in first)
    return (apart / sum(float(value.square().sum()) for value in first.values())) ** 0.5
