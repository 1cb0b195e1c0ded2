"""Predict on a data set over all ranks, and score detectors with COCO metrics."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from engine import distributed
from engine.config.errors import UserError
from engine.data.coco import Classes
from engine.data.loader import evaluation_loader, readable
from engine.forward import Precision, Preprocessor
from engine.monitoring.live import LiveLine

_SUFFIXES = ("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l")  # mmdet's names, in COCOeval's order


@torch.no_grad()
def predict(
    model: nn.Module,
    preprocess: Preprocessor,
    precision: Precision,
    dataset: Any,
    *,
    batch: int,
    workers: int,
    as_numbers: Callable[[Any], dict[str, Any]],
    live: bool,
) -> list[dict[str, Any]]:
    """This rank's share of the predictions: what `as_numbers` makes of the model's output for each image."""
    loader = evaluation_loader(
        dataset, rank=distributed.rank(), world=distributed.world_size(), batch=batch, workers=workers
    )
    line = LiveLine(
        total=len(loader), label="evaluate", interval=max(1, len(loader) // 5), enabled=live and distributed.rank() == 0
    )
    device = distributed.device()
    was_training = model.training
    model.eval()
    predictions = []
    for data in readable(loader):
        images, samples = preprocess(data, training=False)
        with precision.autocast(device):
            outputs = model.predict(images, samples)
        for sample in outputs:
            predictions.append(as_numbers(sample))
        line.update()
    line.close()
    model.train(was_training)
    return predictions


def objects_as_numbers(sample: Any, *, with_masks: bool) -> dict[str, Any]:
    """An image's id and its objects: boxes (xyxy), scores, labels and RLEs."""
    found = sample.pred_instances
    result = dict(
        image_id=sample.img_id,
        boxes=found.bboxes.float().cpu().numpy(),
        scores=found.scores.float().cpu().numpy(),
        labels=found.labels.cpu().numpy(),
    )
    if with_masks:
        from pycocotools import mask as coco_mask

        masks = found.masks.cpu().numpy().astype(np.uint8)
        result["masks"] = [coco_mask.encode(np.asfortranarray(mask)) for mask in masks]
    return result


def gather_predictions(mine: list[dict[str, Any]], expected: int) -> list[dict[str, Any]] | None:
    """All predictions by image id on rank 0, each image exactly once; None elsewhere."""
    shares = distributed.gather_objects(mine)
    if shares is None:
        return None
    everything = sorted((p for share in shares for p in share), key=lambda p: p["image_id"])
    ids = {p["image_id"] for p in everything}
    if len(everything) != expected or len(ids) != expected:
        raise UserError(
            f"evaluation scored {len(everything)} predictions of {len(ids)} images, expected {expected} of "
            f"{expected}: are image ids repeated in the annotation file?"
        )
    return everything


def coco_results(predictions: Sequence[dict[str, Any]], category_ids: Sequence[int], *, masks: bool) -> list[dict]:
    """Predictions as COCO's results format has them: x, y, w, h and the file's own category ids."""
    results = []
    for prediction in predictions:
        for index, (box, score, label) in enumerate(
            zip(prediction["boxes"], prediction["scores"], prediction["labels"])
        ):
            x1, y1, x2, y2 = (float(v) for v in box)
            entry: dict[str, Any] = dict(
                image_id=prediction["image_id"],
                category_id=category_ids[label],
                score=float(score),
                bbox=[x1, y1, x2 - x1, y2 - y1],
            )
            if masks:
                rle = prediction["masks"][index]
                entry.pop("bbox")
                entry["segmentation"] = dict(size=[int(v) for v in rle["size"]], counts=rle["counts"].decode())
            results.append(entry)
    return results


def score(
    content: dict[str, Any], results: dict[str, list[dict]], classes: Classes, category_ids: Sequence[int], backend: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Flat metrics under mmdet's names, and AP and AP50 per class for the table. `results` by kind: bbox, segm."""
    COCO, COCOeval = coco_backend(backend)
    truth = dict(
        content,
        annotations=[
            {"id": number, "iscrowd": 0, **annotation, "area": annotation.get("area", _box_area(annotation))}
            for number, annotation in enumerate(content["annotations"], 1)
        ],
    )
    metrics: dict[str, float] = {}
    per_class: dict[str, dict[str, float]] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # both backends print as they go
        coco = COCO()
        coco.dataset = truth
        coco.createIndex()
        for kind, found in results.items():
            if not found:
                # COCOeval cannot load an empty list; what was not found has AP 0.
                metrics.update({f"{kind}_{suffix}": 0.0 for suffix in _SUFFIXES})
                per_class[kind] = {}
                continue
            evaluation = COCOeval(coco, coco.loadRes(found), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            metrics.update({f"{kind}_{suffix}": float(value) for suffix, value in zip(_SUFFIXES, evaluation.stats)})
            precision = evaluation.eval["precision"]  # IoU x recall x class x area x detections
            order = {category: k for k, category in enumerate(evaluation.params.catIds)}
            per_class[kind] = {}
            for name, category in zip(classes.things, category_ids):
                values = precision[:, :, order[category], 0, -1]
                values = values[values > -1]
                per_class[kind][name] = float(values.mean()) if values.size else float("nan")
    return metrics, per_class


def _box_area(annotation: dict[str, Any]) -> float:
    return annotation["bbox"][2] * annotation["bbox"][3] if "bbox" in annotation else 0.0


def coco_backend(name: str) -> tuple[Any, Any]:
    """COCO and COCOeval of the one who computes AP; a UserError where it is not installed."""
    if name == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        return COCO, COCOeval
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise UserError(
            "run.eval_backend is faster-coco-eval, which is not installed: "
            "pip install faster-coco-eval, or use pycocotools"
        ) from None
    return COCO, COCOeval_faster


def category_ids_for(classes: Classes, content: dict[str, Any]) -> list[int]:
    """This file's category id of every class, by name: two files may number the same classes differently."""
    by_name = {category["name"]: category["id"] for category in content["categories"]}
    return [by_name[name] for name in classes.things]
