"""A trained model from its file: score it on a data set, or run it on images."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from engine import distributed
from engine.config import RunConfig, load_config
from engine.config.errors import ConfigError
from engine.config.load import apply_override, parse_config
from engine.data.build import Split
from engine.data.classification import IMAGE_SUFFIXES
from engine.data.coco import Classes, DataError
from engine.evaluation import gather_predictions, predict
from engine.forward import Precision, Preprocessor
from engine.report import SCORE_SHOWN
from engine.task import Task, task_of
from engine.weights import WeightsError, fit_weights, read_weights


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: nn.Module
    preprocess: Preprocessor
    config: RunConfig
    task: Task
    classes: Classes
    precision: Precision = Precision()


def load_detector(checkpoint: str, config_name: str | None, overrides: Sequence[str], *, ema: bool = False) -> Loaded:
    """The model of a weight file or checkpoint folder. One of ours carries its config; any other needs
    `--deepspeed_config`."""
    tensors, meta = read_weights(checkpoint, ema=ema)
    if config_name is not None:
        config = load_config(config_name, overrides)
    elif isinstance(meta.get("config"), dict):
        data = meta["config"]
        for override in overrides:
            apply_override(data, override)
        config = parse_config(data)
    else:
        raise ConfigError(f"weight file {checkpoint} does not say how its detector is built: give --deepspeed_config")
    task = task_of(config)
    known = meta.get("dataset_meta") if isinstance(meta.get("dataset_meta"), dict) else {}
    if known.get("classes"):
        classes = Classes.from_meta(known)
    else:
        classes = task.read_classes()
    model = task.build_model(classes)
    report = fit_weights(model, tensors, checkpoint, drop_mismatched=False)
    if report.missing:
        raise WeightsError(f"{report}: it is not a checkpoint of this detector")
    device = distributed.device()
    model = model.to(device).eval()
    return Loaded(
        model=model, preprocess=Preprocessor(model, device, Precision()), config=config, task=task, classes=classes
    )


def output_folder(checkpoint: str) -> Path:
    """Where the scores of a checkpoint go: `eval` in its work dir, or beside its file."""
    path = Path(checkpoint).expanduser()
    if path.parent.name == "checkpoints":  # step-N, latest, best
        return path.parent.parent / "eval"
    return (path if path.is_dir() else path.parent) / "eval"


def evaluate(loaded: Loaded, split_name: str, out: Path, *, tta: Sequence[str] | None = None) -> dict[str, float]:
    """Score a split of the config's data on all ranks; `eval.json`, results and a picture go to `out`.

    `tta` are scales of test-time augmentation ([]: the config's own), each as it is and mirrored.
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
        if predictions is not None:
            make_folder(out)
            metrics = task.write_scores(out, predictions, split, loaded.classes, table=True)
            if loaded.config.run.draw:
                task.draw_predictions(out / "predictions.png", predictions, split, loaded.classes)
            print(f"written to {out}: eval.json, results, predictions.png", flush=True)
    return distributed.broadcast_object(metrics)


def with_views(loaded: Loaded, split: Split, texts: Sequence[str]) -> Loaded:
    """The detector that sees every image of the split in several views; it finds boxes only."""
    from engine.tta import MergedViews, ViewPreprocessor, parse_scales, show_views

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


def predict_images(loaded: Loaded, dataset: Any, *, workers: int = 0) -> list[dict[str, Any]]:
    """This rank's share of the predictions."""
    return predict(
        loaded.model,
        loaded.preprocess,
        loaded.precision,
        dataset,
        batch=loaded.config.run.eval_batch_size,
        workers=workers,
        as_numbers=partial(loaded.task.as_numbers, classes=loaded.classes),
        live=True,
    )


def find_images(source: str) -> list[Path]:
    """An image, a folder (its images, not deeper) or a glob, in the order of their names."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = [p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise DataError(
            f"{source} is no image, no folder with images and no pattern that finds one ({', '.join(IMAGE_SUFFIXES)})"
        )
    return sorted(found)


def drawn_paths(paths: Sequence[Path], out: Path) -> list[Path]:
    """Where each image is drawn: its own name, with a number before it where two images share one."""
    stems = Counter(path.stem for path in paths)
    drawn = [
        out / f"{path.stem if stems[path.stem] == 1 else f'{number:04d}-{path.stem}'}.png"
        for number, path in enumerate(paths, 1)
    ]
    sources = {path.resolve() for path in paths}
    for path in drawn:
        if path.resolve() in sources:
            raise ConfigError(f"--out {out} would write over the image {path.name}: choose another folder")
    return drawn


def infer(loaded: Loaded, source: str, out: Path, *, threshold: float = SCORE_SHOWN) -> None:
    """Run the model on images and write what it finds to `out`."""
    with distributed.together():
        paths = find_images(source)
    loaded.task.infer(loaded, paths, out, threshold=threshold)


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {path} cannot be written: {error.strerror}") from None
