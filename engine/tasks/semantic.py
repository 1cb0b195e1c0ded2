"""Semantic segmentation: a class for every pixel, in ADE20K's layout, scored by mean IoU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.build import split_files
from engine.data.coco import check_same_classes
from engine.data.semantic import IGNORED, ClassMapImages, read_class_table
from engine.data.types import Classes, Split
from engine.errors import DataError
from engine.tasks import mean_iou
from engine.tasks.base import UsualData
from engine.tasks.maps import MapTask, pack, unpack


class Semantic(MapTask):
    usual_data = UsualData(20_210, 2_000, 150, 0, "ADE20K")

    def build_data(self) -> tuple[Split, Split, Classes]:
        files = split_files(self.config.data)
        classes = read_class_table(Path(files["train"].annotation_path))
        dataset = ClassMapImages(self.config.data, files["train"], classes, training=True)
        dataset.check_sample()
        return Split(dataset=dataset, files=files["train"]), self.build_split("val", classes), classes

    def build_split(self, name: str, classes: Classes) -> Split:
        files = split_files(self.config.data)[name]
        own = read_class_table(Path(files.annotation_path))
        if own.things != classes.things:
            check_same_classes(classes, own, files.annotation_path)
            raise DataError(f"the classes of {files.annotations} are numbered otherwise than those of the model")
        dataset = ClassMapImages(self.config.data, files, classes, training=False)
        dataset.check_sample()
        dataset.shown = self.config.run.draw
        return Split(dataset=dataset, files=files)

    def read_classes(self) -> Classes:
        return read_class_table(Path(split_files(self.config.data)["val"].annotation_path))

    def read_output(self, output: Any, classes: Classes) -> np.ndarray:
        return output.pred_sem_seg.sem_seg[0].cpu().numpy().astype(np.uint8)

    def score_image(self, truth: np.ndarray, found: np.ndarray) -> dict[int, mean_iou.Row]:
        return mean_iou.image_areas(truth, found, ignored=IGNORED)

    def score(self, images: Sequence[dict[int, Any]], classes: Classes) -> tuple[dict[str, float], dict[str, Any]]:
        table = mean_iou.add_up(images, len(classes.things))
        return mean_iou.iou_metrics(table), mean_iou.iou_by_class(table, classes.things)

    def pack(self, found: np.ndarray) -> Any:
        return pack(found)

    def unpack(self, packed: Any) -> np.ndarray:
        return unpack(packed, np.uint8)

    def regions(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(found == IGNORED, 0, found.astype(np.int32) + 1), np.arange(IGNORED)

    def result(self, found: np.ndarray, classes: Classes) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The PNG of class numbers, and the area of each class."""
        numbers = np.array(classes.category_ids, np.uint8)[found]
        segments = [
            dict(category_id=classes.category_ids[label], category=classes.things[label], area=int(area))
            for label, area in enumerate(np.bincount(found.ravel()))
            if area
        ]
        return numbers, segments
