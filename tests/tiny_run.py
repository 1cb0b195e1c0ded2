"""Runs of a few steps on a few small images: the config, and a function for worker ranks."""

from __future__ import annotations

import copy
import json
import tempfile
from typing import Any

TINY: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 0},
    "detector": {
        "config": "tiny_retinanet",
        # Two stages of a thin ResNet-18: 48 tensors, of odd and even sizes.
        "options": {
            "backbone.base_channels": 8,
            "backbone.num_stages": 2,
            "backbone.strides": [1, 2],
            "backbone.dilations": [1, 1],
            "backbone.out_indices": [0, 1],
            "backbone.norm_cfg": {"type": "GN", "num_groups": 4},
            "neck.in_channels": [8, 16],
            "neck.start_level": 0,
            "neck.out_channels": 16,
            "bbox_head.in_channels": 16,
            "bbox_head.feat_channels": 16,
            "bbox_head.stacked_convs": 1,
            "bbox_head.norm_cfg.num_groups": 4,
            "bbox_head.anchor_generator.strides": [4, 8, 16],
        },
    },
    "data": {
        "dataset": "shapes",
        "shapes": {"train_images": 10, "val_images": 5, "image_size": 96},
        "scale": [96, 96],
        "train_scales": [[80, 80], [112, 112]],
        "workers": 0,
    },
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


def train_tiny(
    changes: dict[str, Any],
    *,
    work_dir: str | None = None,
    resume: str | None = None,
    stop_after: int | None = None,
    curves: bool = False,
) -> dict[str, Any]:
    """Train on this rank's process group; weights (whole), records, and what the work dir holds.

    `stop_after` stops the run as a signal would, saved, after that step. `resume` goes on: "" from the newest
    checkpoint of `work_dir`, or the folder to go on from. `curves` are drawn on request: they take as long as the run.
    """
    import contextlib
    import io

    from engine import distributed, preemption
    from engine.config.origin import Origin
    from engine.recipes.load import parse_config
    from engine.train import after_step, loop
    from engine.train.work_dir import Resume
    from engine.zero.whole_parameters import whole_state

    kept: dict[str, Any] = {}
    build, asked, finish = loop.build_run, preemption.stop_asked, loop.finish_report

    def keep(*args: Any) -> Any:
        kept["run"] = build(*args)
        return kept["run"]

    if work_dir is None and not resume:
        work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    loop.build_run = keep
    # Ranks ask in every micro-step, before its forward pass.
    preemption.stop_asked = lambda: kept["run"].engine.global_steps + 1 == stop_after
    loop.finish_report = finish if curves else lambda work_dir: None
    metrics: dict[str, float] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            metrics = loop.train(
                parse_config(merged({"run": {"work_dir": work_dir}}, merged(changes)), origin=Origin.USER),
                None if resume is None else Resume(resume or None),
            )
    except after_step.Preempted:
        assert stop_after is not None
    finally:
        loop.build_run, preemption.stop_asked, loop.finish_report = build, asked, finish
        if "run" in kept:
            run = kept["run"]
            weights = {name: value.float().clone() for name, value in whole_state(run.engine.module)}
            # `destroy` is what takes ZeRO's hooks off the process before the next run in it.
            run.engine.destroy()
    folder = run.work_dir
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": weights,
        "records": records,
        "metrics": metrics,
        "folder": str(folder),
        "mu": run_mu(run),
        "files": sorted(p.name for p in folder.rglob("*")),
        "printed": printed.getvalue(),
    }


def saved_weights(path: Any, *, ema: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a checkpoint folder or weight file, and its meta."""
    from engine.checkpoints.reading import read_weights
    from engine.modeling.weights import whole

    tensors, meta = read_weights(path, ema=ema)
    return {name: whole(value).clone() for name, value in tensors.items()}, meta


def run_mu(run: Any) -> dict[str, float]:
    return dict(run.optimizer.mu) if hasattr(run.optimizer, "mu") else {}


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The greatest difference of any weight, relative to the greatest weight of its tensor."""
    assert first.keys() == second.keys()
    return max(float((first[n] - second[n]).abs().max() / first[n].abs().max().clamp(min=1e-12)) for n in first)


def distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Euclidean and relative over all weights: for runs in which single small weights may be off."""
    apart = sum(float((first[n] - second[n]).square().sum()) for n in first)
    return (apart / sum(float(value.square().sum()) for value in first.values())) ** 0.5
