"""Score a loaded model on a split of its data, with all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine import distributed
from engine.data.types import Split
from engine.errors import ConfigError
from engine.files import CHECKPOINTS, PREDICTIONS, make_folder
from engine.inference.load import Loaded, predict_images
from engine.inference.tta import MergedViews, ViewPreprocessor, parse_scales, show_views
from engine.tasks.predicting import gather_predictions
from engine.tasks.registry import task_of


def output_folder(checkpoint: str) -> Path:
    """Where the scores of a checkpoint go: `eval` in its work dir, or beside its file."""
    path = Path(checkpoint).expanduser()
    if path.parent.name == CHECKPOINTS:  # step-N, latest, best
        return path.parent.parent / "eval"
    return (path if path.is_dir() else path.parent) / "eval"


def evaluate(loaded: Loaded, split_name: str, out: Path, *, tta: Sequence[str] | None = None) -> dict[str, float]:
    """Score a split of the config's data with all ranks, and write `eval.json`, results and a picture to `out`.

    `tta` are the scales of test-time augmentation ([]: the config's scale). Each is used with and without mirroring.
    """
    with distributed.together():
        split = loaded.task.build_split(split_name, loaded.classes)
        if tta is not None:
            loaded = with_views(loaded, split, tta)
        task = loaded.task
        mine = predict_images(loaded, split.dataset, workers=loaded.config.data.workers)
    metrics: dict[str, float] = {}
    with distributed.together():
        predictions = gather_predictions(mine, len(split.dataset))
    began = time.monotonic()
    scored = task.score_with_ranks(predictions, split, loaded.classes)
    with distributed.together():
        if predictions is not None:
            make_folder(out)
            metrics = task.write_scores(out, predictions, split, loaded.classes, table=True, scored=scored)
            print(f"scored in {time.monotonic() - began:.1f} s", flush=True)
            if loaded.config.run.draw:
                task.draw_predictions(out / PREDICTIONS, predictions, split, loaded.classes)
            print(f"written to {out}: eval.json, results, predictions.png", flush=True)
    return distributed.broadcast_object(metrics)


def with_views(loaded: Loaded, split: Split, texts: Sequence[str]) -> Loaded:
    """A detector that predicts on several views of every image of the split. It finds boxes only."""
    data = loaded.config.data
    if data.task not in ("detection", "instance"):
        raise ConfigError(f'--tta merges boxes, but data.task is "{data.task}"')
    show_views(split, parse_scales(texts, data.scale))
    config = loaded.config.model_copy(update={"data": data.model_copy(update={"task": "detection"})})
    return replace(
        loaded,
        model=MergedViews(loaded.model, config),
        task=task_of(config),
        preprocess=ViewPreprocessor(loaded.preprocess),
    )
