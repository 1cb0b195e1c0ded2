"""Detection and instance segmentation: boxes or masks, scored with COCO metrics and drawn on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask
from torch import nn

from engine import distributed
from engine.config import RunConfig
from engine.data.build import build_data, build_split, read_file_classes
from engine.data.coco import test_pipeline
from engine.data.plain import PlainImages
from engine.data.types import Classes, Split
from engine.files import make_folder, write_json
from engine.modeling.detector import one_class
from engine.tasks.base import Predict, Prediction, UsualData
from engine.tasks.coco_ranks import score_categories
from engine.tasks.coco_scores import category_ids_for, coco_results, write_scores
from engine.tasks.mmdet_task import MmdetTask
from engine.tasks.pictures import draw_objects, drawn_paths, read_image, save_image, side_by_side
from engine.tasks.predicting import gather_sorted

SCORE_SHOWN = 0.3


class Detection(MmdetTask):
    # Of 118,287 training images, those with annotations (`data.keep_empty` is false by default).
    usual_data = UsualData(117_266, 5_000, 80, 0, "COCO 2017")

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.with_masks = config.data.task == "instance"
        self.one_class = False

    def build_data(self) -> tuple[Split, Split, Classes]:
        return build_data(self.config.data)

    def build_split(self, name: str, classes: Classes) -> Split:
        return build_split(self.config.data, name, classes)

    def read_classes(self) -> Classes:
        return read_file_classes(self.config.data, "val")

    def build_model(self, classes: Classes) -> nn.Module:
        model = super().build_model(classes)
        self.one_class = one_class(model)
        return model

    def as_numbers(self, output: Any, classes: Classes) -> Prediction:
        return objects_as_numbers(output, with_masks=self.with_masks)

    def score_with_ranks(self, predictions: Sequence[Prediction] | None, split: Split, classes: Classes) -> Any:
        if distributed.world_size() == 1 or self.one_class:  # one category cannot be divided
            return None
        assert split.truth is not None
        return score_categories(
            predictions, split.truth, classes, masks=self.with_masks, backend=self.config.run.eval_backend
        )

    def write_scores(
        self,
        folder: Path,
        predictions: Sequence[Prediction],
        split: Split,
        classes: Classes,
        *,
        table: bool,
        scored: Any = None,
    ) -> dict[str, float]:
        assert split.truth is not None
        # The truth of a large split takes seconds to unpack, and is of no use if the ranks have scored it.
        content = split.content if scored is None else {"categories": split.truth.categories}
        return write_scores(
            folder,
            predictions,
            content,
            classes,
            masks=self.with_masks,
            one_class=self.one_class,
            backend=self.config.run.eval_backend,
            table=table,
            parts=scored,
        )

    def draw_predictions(self, path: Path, predictions: Sequence[Prediction], split: Split, classes: Classes) -> None:
        draw_beside_truth(
            path, predictions, split.content, Path(split.files.images), classes, count=self.config.run.draw
        )

    def infer(self, predict: Predict, classes: Classes, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Draw the objects found on every image, and write them as a COCO results file with file names."""
        with distributed.together():
            drawn_to = drawn_paths(paths, out)
            mine = predict(PlainImages(paths, test_pipeline(self.config.data)))
            make_folder(out)
            for prediction in mine:
                place = prediction["image_id"] - 1
                objects = shown_objects(prediction, threshold)
                save_image(drawn_to[place], draw_objects(read_image(paths[place]), objects, classes.things))
        with distributed.together():
            predictions = gather_sorted(mine)
            if predictions:
                entries = coco_results(predictions, classes.category_ids, masks=self.with_masks)
                boxes = coco_results(predictions, classes.category_ids, masks=False)
                for entry, box in zip(entries, boxes):
                    entry.update(
                        bbox=box["bbox"],
                        file_name=paths[entry["image_id"] - 1].name,
                        category=classes.things[classes.category_ids.index(entry["category_id"])],
                    )
                write_json(out / "results.json", entries)
                shown = int(np.sum([(p["scores"] >= threshold).sum() for p in predictions]))
                print(
                    f"{shown} objects with a score of at least {threshold:g} on {len(predictions)} images; "
                    f"drawn images and results.json in {out}",
                    flush=True,
                )


def objects_as_numbers(sample: Any, *, with_masks: bool) -> dict[str, Any]:
    """An image's id and its objects: boxes (xyxy), scores, labels, and masks as RLE."""
    found = sample.pred_instances
    result = dict(
        image_id=sample.img_id,
        boxes=found.bboxes.float().cpu().numpy(),
        scores=found.scores.float().cpu().numpy(),
        labels=found.labels.long().cpu().numpy(),  # CrowdDet's are fp32
    )
    if with_masks:
        masks = found.masks.cpu().numpy().astype(np.uint8)
        result["masks"] = [coco_mask.encode(np.asfortranarray(mask)) for mask in masks]
    return result


def draw_beside_truth(
    path: Path,
    predictions: Sequence[dict[str, Any]],
    content: dict[str, Any],
    folder: Path,
    classes: Classes,
    *,
    count: int,
) -> None:
    """Ground truth and prediction of the first images that have objects."""
    files = {image["id"]: image for image in content["images"]}
    labels = {category: label for label, category in enumerate(category_ids_for(classes, content))}
    annotations = [a for a in content["annotations"] if not a.get("iscrowd")]
    with_objects = {annotation["image_id"] for annotation in annotations}
    drawn = [prediction for prediction in predictions if prediction["image_id"] in with_objects][:count]
    wanted = {prediction["image_id"] for prediction in drawn}
    truth: dict[int, list[dict[str, Any]]] = {}
    for annotation in annotations:
        if annotation["image_id"] in wanted:  # masks are large: those of a whole data set would fill the memory
            x, y, w, h = annotation["bbox"]
            shape = files[annotation["image_id"]]
            truth.setdefault(annotation["image_id"], []).append(
                dict(
                    bbox=(x, y, x + w, y + h),
                    label=labels[annotation["category_id"]],
                    mask=_decode(annotation.get("segmentation"), shape) if "masks" in predictions[0] else None,
                )
            )
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    for prediction in drawn:
        image = read_image(folder / files[prediction["image_id"]]["file_name"])
        both = truth[prediction["image_id"]], shown_objects(prediction)
        rows.append((draw_objects(image, both[0], classes.things), draw_objects(image, both[1], classes.things)))
    if rows:
        side_by_side(rows, path)


def shown_objects(prediction: dict[str, Any], threshold: float = SCORE_SHOWN) -> list[dict[str, Any]]:
    """The objects of a prediction to draw: those above the threshold, the best one last, so that it is on top."""
    objects = [
        dict(bbox=box, score=float(score), label=int(label))
        for box, score, label in zip(prediction["boxes"], prediction["scores"], prediction["labels"])
    ]
    if "masks" in prediction:
        for item, rle in zip(objects, prediction["masks"]):
            item["mask"] = coco_mask.decode(rle)
    return sorted((o for o in objects if o["score"] >= threshold), key=lambda o: o["score"])


def _decode(segmentation: Any, image: dict[str, Any]) -> Any:
    if not segmentation:
        return None
    height, width = image["height"], image["width"]
    if isinstance(segmentation, list):
        return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)
