"""A trained detector from its file: score it on a data set, or run it on images."""

from __future__ import annotations

import glob
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from torch import nn

from engine import distributed
from engine.config import RunConfig, load_config
from engine.config.errors import ConfigError
from engine.config.load import apply_override, parse_config
from engine.data.build import split_files
from engine.data.coco import Classes, DataError, build_dataset, check_same_classes, read_annotations, read_classes
from engine.evaluation import coco_results, gather_predictions, predict
from engine.forward import Precision, Preprocessor
from engine.monitoring.pictures import draw_objects, read_image, save_image
from engine.monitoring.records import write_json
from engine.report import SCORE_SHOWN, draw_predictions, shown_objects, write_scores
from engine.weights import WeightsError, load_weights, read_file

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: nn.Module
    preprocess: Preprocessor
    config: RunConfig
    classes: Classes
    precision: Precision = Precision()


def load_detector(checkpoint: str, config_name: str | None, overrides: Sequence[str]) -> Loaded:
    """The detector of a weight file. One of ours carries its config; any other needs `--deepspeed_config`."""
    from engine.detector import build_detector

    _, meta = read_file(checkpoint)
    if config_name is not None:
        config = load_config(config_name, overrides)
    elif isinstance(meta.get("config"), dict):
        data = meta["config"]
        for override in overrides:
            apply_override(data, override)
        config = parse_config(data)
    else:
        raise ConfigError(f"weight file {checkpoint} does not say how its detector is built: give --deepspeed_config")
    known = meta.get("dataset_meta") if isinstance(meta.get("dataset_meta"), dict) else {}
    if known.get("classes"):
        names = tuple(known["classes"])
        classes = Classes(names, (), tuple(known.get("category_ids", range(1, len(names) + 1))))
    else:
        content = read_annotations(split_files(config.data)["val"].annotations)
        classes = read_classes(content, panoptic=config.data.task == "panoptic")
    model = build_detector(config.detector, classes, config.data.task)
    report = load_weights(model, checkpoint, drop_mismatched=False)
    if report.missing:
        raise WeightsError(f"{report}: it is not a checkpoint of this detector")
    device = distributed.device()
    model = model.to(device).eval()
    return Loaded(model=model, preprocess=Preprocessor(model, device, Precision()), config=config, classes=classes)


def evaluate(loaded: Loaded, split: str, out: Path) -> dict[str, float]:
    """Score a split of the config's data on all ranks; `eval.json`, results and a picture go to `out`."""
    config, masks = loaded.config, loaded.config.data.task == "instance"
    with distributed.together():
        files = split_files(config.data)[split]
        content = read_annotations(files.annotations)
        check_same_classes(loaded.classes, read_classes(content, panoptic=False), files.annotations)
        dataset = build_dataset(config.data, files, loaded.classes, training=False, content=content)
        mine = predict(loaded.model, loaded.preprocess, loaded.precision, dataset, batch=config.run.eval_batch_size,
                       workers=config.data.workers, with_masks=masks, live=True)
    metrics: dict[str, float] = {}
    with distributed.together():
        predictions = gather_predictions(mine, len(dataset))
        if predictions is not None:
            _make_folder(out)
            metrics = write_scores(out, predictions, content, loaded.classes, masks=masks,
                                   backend=config.run.eval_backend, table=True)
            if config.run.draw:
                draw_predictions(out / "predictions.png", predictions, content, Path(files.images), loaded.classes,
                                 count=config.run.draw)
            print(f"written to {out}: eval.json, results, predictions.png", flush=True)
    return distributed.broadcast_object(metrics)


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
        raise DataError(f"{source} is no image, no folder with images and no pattern that finds one "
                        f"({', '.join(IMAGE_SUFFIXES)})")
    return sorted(found)


def drawn_paths(paths: Sequence[Path], out: Path) -> list[Path]:
    """Where each image is drawn: its own name, with a number before it where two images share one."""
    stems = Counter(path.stem for path in paths)
    drawn = [out / f"{path.stem if stems[path.stem] == 1 else f'{number:04d}-{path.stem}'}.png"
             for number, path in enumerate(paths, 1)]
    sources = {path.resolve() for path in paths}
    for path in drawn:
        if path.resolve() in sources:
            raise ConfigError(f"--out {out} would write over the image {path.name}: choose another folder")
    return drawn


class _Images:
    """Images in the form of a test data set, so that prediction is the same code as in evaluation."""

    def __init__(self, paths: Sequence[Path], pipeline: Any) -> None:
        self.paths, self.pipeline = paths, pipeline

    def __len__(self) -> int:
        return len(self.paths)

    def get_data_info(self, index: int) -> dict[str, Any]:
        return dict(img_path=str(self.paths[index]), img_id=index + 1)

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(self.get_data_info(index))


def infer(loaded: Loaded, source: str, out: Path, *, threshold: float = SCORE_SHOWN) -> None:
    """Draw the objects found on every image and write them as a COCO results file, with file names."""
    from mmengine.dataset import Compose

    from engine.data.coco import test_pipeline

    masks = loaded.config.data.task == "instance"
    with distributed.together():
        paths = find_images(source)
        drawn_to = drawn_paths(paths, out)
        images = _Images(paths, Compose(test_pipeline(loaded.config.data)))
        mine = predict(loaded.model, loaded.preprocess, loaded.precision, images,
                       batch=loaded.config.run.eval_batch_size, workers=0, with_masks=masks, live=True)
        _make_folder(out)
        for prediction in mine:
            place = prediction["image_id"] - 1
            drawn = draw_objects(read_image(paths[place]), shown_objects(prediction, threshold), loaded.classes.things)
            save_image(drawn_to[place], drawn)
    with distributed.together():
        predictions = gather_predictions(mine, len(paths))
        if predictions is not None:
            entries = coco_results(predictions, loaded.classes.category_ids, masks=masks)
            boxes = coco_results(predictions, loaded.classes.category_ids, masks=False)
            for entry, box in zip(entries, boxes):
                entry.update(bbox=box["bbox"], file_name=paths[entry["image_id"] - 1].name,
                             category=loaded.classes.things[loaded.classes.category_ids.index(entry["category_id"])])
            write_json(out / "results.json", entries)
            shown = int(np.sum([(p["scores"] >= threshold).sum() for p in predictions]))
            print(f"{shown} objects with a score of at least {threshold:g} on {len(paths)} images; "
                  f"drawn images and results.json in {out}", flush=True)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {path} cannot be written: {error.strerror}") from None
