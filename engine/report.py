"""What a run leaves for a person: scores as JSON and as a table, curves, and predictions beside ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from engine import distributed
from engine.evaluation import category_ids_for, coco_results, gather_predictions, predict, score
from engine.monitoring.curves import draw_curves
from engine.monitoring.pictures import draw_objects, read_image, side_by_side
from engine.monitoring.records import RecordError, RecordFile, write_json

if TYPE_CHECKING:
    from engine.building import Run

SCORE_SHOWN = 0.3


def evaluate_and_report(run: Run, model: nn.Module, step: int, *, last: bool) -> dict[str, float]:
    """Score the validation split, record it, and after the last step write results and pictures."""
    config = run.config
    with distributed.together():
        mine = predict(
            model,
            run.preprocess,
            run.precision,
            run.val.dataset,
            batch=config.run.eval_batch_size,
            workers=config.data.workers,
            as_numbers=partial(run.task.as_numbers, classes=run.classes),
            live=True,
        )
    metrics: dict[str, float] = {}
    with distributed.together():
        predictions = gather_predictions(mine, len(run.val.dataset))
        if predictions is not None:
            try:
                metrics = _write_evaluation(run, predictions, step, last=last)
            except RecordError as error:
                if config.run.on_save_error == "stop":
                    raise
                print(f"{error}; training goes on (run.on_save_error)", flush=True)
    return distributed.broadcast_object(metrics)


def _write_evaluation(run: Run, predictions: Sequence[dict[str, Any]], step: int, *, last: bool) -> dict[str, float]:
    metrics = run.task.write_scores(run.work_dir, predictions, run.val, run.classes, table=last)
    records = RecordFile(run.work_dir / "evaluations.jsonl")
    records.write({"step": step, **metrics})
    records.close()
    if run.engine.monitor.enabled:
        run.engine.monitor.write_events([(f"val/{name}", value, step) for name, value in metrics.items()])
    if last and run.config.run.draw:
        run.task.draw_predictions(run.work_dir / "predictions.png", predictions, run.val, run.classes)
    return metrics


def write_scores(
    folder: Path,
    predictions: Sequence[dict[str, Any]],
    content: dict[str, Any],
    classes: Any,
    *,
    masks: bool,
    backend: str,
    table: bool,
) -> dict[str, float]:
    """`eval.json` and `results.*.json` in a folder, and the table on the screen."""
    ids = category_ids_for(classes, content)
    results = {"bbox": coco_results(predictions, ids, masks=False)}
    if masks:
        results["segm"] = coco_results(predictions, ids, masks=True)
    for kind, entries in results.items():  # before scoring, for COCOeval adds keys of its own to them
        write_json(folder / f"results.{kind}.json", entries)
    metrics, per_class = score(content, results, classes, ids, backend)
    write_json(folder / "eval.json", metrics, indent=2)
    if table:
        print(result_table(metrics, per_class), flush=True)
    return metrics


def result_table(metrics: dict[str, float], per_class: dict[str, dict[str, float]]) -> str:
    kinds = list(per_class)
    columns = ("mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l")
    lines = ["", f"{'':12}" + "".join(f"{c:>9}" for c in columns)]
    for kind in kinds:
        lines.append(f"{kind:12}" + "".join(f"{_number(metrics[f'{kind}_{c}']):>9}" for c in columns))
    for kind in kinds:
        if per_class[kind]:
            cells = [f"{name} {_number(value)}" for name, value in per_class[kind].items()]
            lines.append(f"{kind} mAP by class: " + ", ".join(cells[:12]) + (", ..." if len(cells) > 12 else ""))
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "-"  # COCOeval answers -1 where nothing of that size exists


def draw_predictions(
    path: Path,
    predictions: Sequence[dict[str, Any]],
    content: dict[str, Any],
    folder: Path,
    classes: Any,
    *,
    count: int,
) -> None:
    """Ground truth and prediction of the first images that have objects."""
    files = {image["id"]: image for image in content["images"]}
    labels = {category: label for label, category in enumerate(category_ids_for(classes, content))}
    truth: dict[int, list[dict[str, Any]]] = {}
    for annotation in content["annotations"]:
        known = annotation["image_id"] in files and annotation.get("category_id") in labels
        if known and not annotation.get("iscrowd") and "bbox" in annotation:
            x, y, w, h = annotation["bbox"]
            shape = files[annotation["image_id"]]
            truth.setdefault(annotation["image_id"], []).append(
                dict(
                    bbox=(x, y, x + w, y + h),
                    label=labels[annotation["category_id"]],
                    mask=_decode(annotation.get("segmentation"), shape) if "masks" in predictions[0] else None,
                )
            )
    rows = []
    for prediction in predictions:
        if prediction["image_id"] in truth and len(rows) < count:
            image = read_image(folder / files[prediction["image_id"]]["file_name"])
            rows.append(
                (
                    draw_objects(image, truth[prediction["image_id"]], classes.things),
                    draw_objects(image, shown_objects(prediction), classes.things),
                )
            )
    if rows:
        side_by_side(rows, path)


def shown_objects(prediction: dict[str, Any], threshold: float = SCORE_SHOWN) -> list[dict[str, Any]]:
    """The objects of a prediction worth drawing, the surest on top."""
    objects = [
        dict(bbox=box, score=float(score), label=int(label))
        for box, score, label in zip(prediction["boxes"], prediction["scores"], prediction["labels"])
    ]
    if "masks" in prediction:
        from pycocotools import mask as coco_mask

        for item, rle in zip(objects, prediction["masks"]):
            item["mask"] = coco_mask.decode(rle)
    return sorted((o for o in objects if o["score"] >= threshold), key=lambda o: o["score"])


def _decode(segmentation: Any, image: dict[str, Any]) -> Any:
    from pycocotools import mask as coco_mask

    if not segmentation:
        return None
    height, width = image["height"], image["width"]
    if isinstance(segmentation, list):
        return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)


def finish_report(work_dir: Path) -> None:
    try:
        draw_curves(work_dir)
    except OSError as error:
        print(f"curves.png cannot be written: {error.strerror}", flush=True)
    shown = [
        name
        for name in ("eval.json", "curves.png", "predictions.png", "metrics.jsonl", "checkpoints")
        if (work_dir / name).exists()
    ]
    print(f"written to {work_dir}: {', '.join(shown)}", flush=True)
