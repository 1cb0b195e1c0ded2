"""AP of boxes and masks: results in COCO's form, scored by pycocotools or faster-coco-eval."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from engine.data.types import Classes
from engine.errors import UserError, first_of
from engine.files import EVAL, write_json

_SUFFIXES = ("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l")  # mmdet's names, in COCOeval's order


def coco_results(predictions: Sequence[dict[str, Any]], category_ids: Sequence[int], *, masks: bool) -> list[dict]:
    """Predictions in COCO's results format: x, y, w, h, and the category ids of the annotation file."""
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


class Part(NamedTuple):
    """Precision and recall of some categories."""

    category_ids: list[int]
    precision: np.ndarray  # IoU x recall x category x area x detections
    recall: np.ndarray  # IoU x category x area x detections


def evaluate_categories(
    content: dict[str, Any], results: list[dict], kind: str, backend: str, category_ids: Sequence[int]
) -> Part:
    """The score of these categories. The content and the results need no others."""
    coco_class, eval_class = coco_backend(backend)
    with contextlib.redirect_stdout(io.StringIO()):  # both backends print as they go
        coco = coco_class()
        coco.dataset = ground_truth(content, masks=kind == "segm")
        coco.createIndex()
        if results:
            found = coco.loadRes(results)
        else:  # loadRes takes no empty list
            found = coco_class()
            found.dataset = {**coco.dataset, "annotations": []}
            found.createIndex()
        evaluation = eval_class(coco, found, kind)
        evaluation.params.catIds = sorted(category_ids)
        evaluation.evaluate()
        evaluation.accumulate()
    return Part(sorted(category_ids), evaluation.eval["precision"], evaluation.eval["recall"])


def score(
    content: dict[str, Any], results: dict[str, list[dict]], classes: Classes, category_ids: Sequence[int], backend: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Flat metrics under mmdet's names, and AP per class for the table. `results` are by kind: bbox, segm."""
    every = [category["id"] for category in content["categories"]]
    parts = {
        kind: [evaluate_categories(content, found, kind, backend, every)] if found else []
        for kind, found in results.items()
    }
    return summary(parts, classes, category_ids, backend)


def summary(
    parts: dict[str, list[Part]], classes: Classes, category_ids: Sequence[int], backend: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The same from parts of the categories; without parts there were no predictions, and AP is 0."""
    _, eval_class = coco_backend(backend)
    metrics: dict[str, float] = {}
    per_class: dict[str, dict[str, float]] = {}
    for kind, some in parts.items():
        if not some:
            metrics.update({f"{kind}_{suffix}": 0.0 for suffix in _SUFFIXES})
            per_class[kind] = {}
            continue
        ids = [category for part in some for category in part.category_ids]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        precision = np.concatenate([part.precision for part in some], axis=2)[:, :, order]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = eval_class(iouType=kind)
            evaluation.params.catIds = sorted(ids)
            evaluation.matched = False  # faster-coco-eval: no single matches are known here
            recall = np.concatenate([part.recall for part in some], axis=1)[:, order]
            evaluation.eval = {"params": evaluation.params, "precision": precision, "recall": recall}
            evaluation.summarize()
        metrics.update({f"{kind}_{suffix}": float(value) for suffix, value in zip(_SUFFIXES, evaluation.stats)})
        place = {category: k for k, category in enumerate(sorted(ids))}
        per_class[kind] = {}
        for name, category in zip(classes.things, category_ids):
            values = precision[:, :, place[category], 0, -1]
            values = values[values > -1]
            per_class[kind][name] = float(values.mean()) if values.size else float("nan")
    return metrics, per_class


def ground_truth(content: dict[str, Any], *, masks: bool) -> dict[str, Any]:
    """The content of a cleaned annotation file as COCO's evaluation needs it, and nothing else of it.

    Objects are numbered anew: the evaluation finds them by id, and takes an object with the id 0 for none.
    """
    fields = ("image_id", "category_id", "bbox", *(["segmentation"] if masks else []))
    return {
        "images": [{key: image[key] for key in ("id", "height", "width")} for image in content["images"]],
        "categories": [{key: category[key] for key in ("id", "name")} for category in content["categories"]],
        "annotations": [
            {
                **{key: annotation[key] for key in fields},
                "id": number,
                "iscrowd": int(annotation.get("iscrowd", 0)),
                "area": annotation.get("area", annotation["bbox"][2] * annotation["bbox"][3]),
            }
            for number, annotation in enumerate(content["annotations"], 1)
        ],
    }


def coco_backend(name: str) -> tuple[Any, Any]:
    """The COCO and COCOeval classes of the chosen backend; `auto` is faster-coco-eval where it is installed."""
    if name == "pycocotools":
        return COCO, COCOeval
    try:
        import faster_coco_eval  # here: it may not be installed
    except ImportError:
        if name == "auto":
            return COCO, COCOeval
        raise UserError(
            "run.eval_backend is faster-coco-eval, which is not installed: "
            "pip install faster-coco-eval, or use pycocotools"
        ) from None
    return faster_coco_eval.COCO, faster_coco_eval.COCOeval_faster


def category_ids_for(classes: Classes, content: dict[str, Any]) -> list[int]:
    """The category id of every class in this file, found by name: two files may number classes differently."""
    by_name = {category["name"]: category["id"] for category in content["categories"]}
    return [by_name[name] for name in classes.things]


def write_scores(
    folder: Path,
    predictions: Sequence[dict[str, Any]],
    content: dict[str, Any],
    classes: Classes,
    *,
    masks: bool,
    backend: str,
    table: bool,
    one_class: bool = False,
    parts: dict[str, list[Part]] | None = None,
) -> dict[str, float]:
    """Write `eval.json` and `results.*.json` to a folder, and print a table if asked.

    `parts` is the score as far as the ranks have computed it (`engine.tasks.coco_ranks`); without it all is done here.

    `one_class`: the detector finds objects without their classes, so all objects count as those of the first class.
    """
    ids = category_ids_for(classes, content)
    if one_class:
        merged = [{**annotation, "category_id": ids[0]} for annotation in content["annotations"]]
        content = {**content, "annotations": merged}
    results = {"bbox": coco_results(predictions, ids, masks=False)}
    if masks:
        results["segm"] = coco_results(predictions, ids, masks=True)
    for kind, entries in results.items():  # before scoring, because COCOeval adds keys to them
        write_json(folder / f"results.{kind}.json", entries)
    if parts is not None:
        metrics, per_class = summary(parts, classes, ids, backend)
    else:
        metrics, per_class = score(content, results, classes, ids, backend)
    write_json(folder / EVAL, metrics, indent=2)
    if table:
        print(result_table(metrics, per_class), flush=True)
    return metrics


def result_table(metrics: dict[str, float], per_class: dict[str, dict[str, float]]) -> str:
    kinds = list(per_class)
    columns = _SUFFIXES
    lines = ["", f"{'':12}" + "".join(f"{c:>9}" for c in columns)]
    for kind in kinds:
        lines.append(f"{kind:12}" + "".join(f"{_number(metrics[f'{kind}_{c}']):>9}" for c in columns))
    for kind in kinds:
        if per_class[kind]:
            cells = [f"{name} {_number(value)}" for name, value in per_class[kind].items()]
            lines.append(f"{kind} mAP by class: {first_of(cells, 12)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "-"  # COCOeval gives -1 if there is no object of that size
