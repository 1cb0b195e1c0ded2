"""Train the weights that all runs of a study start from: a substitute for a pre-trained backbone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.checkpoints.reading import read_weights
from engine.files import CHECKPOINTS
from engine.modeling.weights import whole
from engine.recipes.load import load_config
from engine.study.grid import Study, batch_settings, optimizer_settings
from engine.study.trial import alone, end_with_study, is_orphan
from engine.train.loop import train


def make_start(study: Study, path: Path) -> None:
    """Train the start's method at the smallest batch, and save some of the weights in `path`."""
    start, batch = study.start, study.batches[0]
    assert start is not None
    method, folder = study.methods[start.method], path.parent / "start"
    if is_orphan():
        return
    end_with_study()
    with alone(folder):
        train(
            load_config(
                study.config,
                [
                    *study.set,
                    *batch_settings(study, batch),
                    *optimizer_settings(method, study.rate(start.method, batch), {}),
                    *start.set,
                    "schedule.steps=null",
                    f"schedule.epochs={start.epochs}",
                    "schedule.warmup_steps=null",
                    f"schedule.warmup_epochs={study.warmup * start.epochs}",
                    "run.checkpoint_interval=null",
                    "run.eval_interval=0",
                    f"run.work_dir={json.dumps(str(folder))}",
                ],
            )
        )
        weights, _ = read_weights(folder / CHECKPOINTS / "latest")
        kept = {
            name: whole(value)
            for name, value in weights.items()
            if any(name == prefix or name.startswith(f"{prefix}.") for prefix in start.keep)
        }
        part = path.with_suffix(".part")
        torch.save({"state_dict": kept}, part)
        part.rename(path)
