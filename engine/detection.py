"""The task of detectors: boxes or masks, scored with COCO metrics and drawn on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from engine import distributed
from engine.config import RunConfig
from engine.data.build import Split, build_data, read_content, split_files
from engine.data.coco import Classes, build_dataset, check_same_classes, read_annotations, read_classes, test_pipeline
from engine.data.plain import PlainImages
from engine.detector import build_detector, build_preprocessor
from engine.evaluation import coco_results, gather_predictions, objects_as_numbers
from engine.monitoring.pictures import draw_objects, read_image, save_image
from engine.monitoring.records import write_json
from engine.report import draw_predictions, shown_objects, write_scores

if TYPE_CHECKING:
    from engine.inference import Loaded


class Detection:
    """See `engine.task.Task`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.masks = config.data.task == "instance"

    def build_data(self) -> tuple[Split, Split, Classes]:
        return build_data(self.config.data)

    def build_split(self, name: str, classes: Classes) -> Split:
        files = split_files(self.config.data)[name]
        content = read_content(files)
        check_same_classes(classes, read_classes(content, panoptic=False), files.annotations)
        dataset = build_dataset(self.config.data, files, classes, training=False, content=content)
        return Split(dataset=dataset, content=content, files=files)

    def read_classes(self) -> Classes:
        return read_classes(read_annotations(split_files(self.config.data)["val"].annotations), panoptic=False)

    def build_model(self, classes: Classes) -> nn.Module:
        return build_detector(self.config.detector, classes, self.config.data.task)

    def build_preprocessor(self, classes: Classes) -> nn.Module:
        return build_preprocessor(self.config.detector, classes)

    def as_numbers(self, output: Any, classes: Classes) -> dict[str, Any]:
        return objects_as_numbers(output, with_masks=self.masks)

    def write_scores(
        self, folder: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes, *, table: bool
    ) -> dict[str, float]:
        return write_scores(
            folder,
            predictions,
            split.content,
            classes,
            masks=self.masks,
            backend=self.config.run.eval_backend,
            table=table,
        )

    def draw_predictions(
        self, path: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes
    ) -> None:
        draw_predictions(
            path, predictions, split.content, Path(split.files.images), classes, count=self.config.run.draw
        )

    def infer(self, loaded: Loaded, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Draw the objects found on every image and write them as a COCO results file, with file names."""
        from engine.inference import drawn_paths, make_folder, predict_images

        classes = loaded.classes
        with distributed.together():
            drawn_to = drawn_paths(paths, out)
            mine = predict_images(loaded, PlainImages(paths, test_pipeline(self.config.data)))
            make_folder(out)
            for prediction in mine:
                place = prediction["image_id"] - 1
                objects = shown_objects(prediction, threshold)
                save_image(drawn_to[place], draw_objects(read_image(paths[place]), objects, classes.things))
        with distributed.together():
            predictions = gather_predictions(mine, len(paths))
            if predictions is not None:
                entries = coco_results(predictions, classes.category_ids, masks=self.masks)
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
                    f"{shown} objects with a score of at least {threshold:g} on {len(paths)} images; "
                    f"drawn images and results.json in {out}",
                    flush=True,
                )
