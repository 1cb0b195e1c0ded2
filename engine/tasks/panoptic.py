"""Panoptic segmentation: things and stuff of COCO-panoptic, scored by panoptic quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np

from engine.data.build import build_data, build_split, read_file_classes
from engine.data.panoptic_map import PanopticMap, encode_png, from_codes
from engine.data.types import Classes, Split
from engine.tasks import panoptic_quality
from engine.tasks.base import UsualData
from engine.tasks.maps import MapTask, pack, unpack


class Panoptic(MapTask):
    with_masks = True
    usual_data = UsualData(118_287, 5_000, 80, 53, "COCO 2017")

    def build_data(self) -> tuple[Split, Split, Classes]:
        train, val, classes = build_data(self.config.data)
        val.dataset.shown = self.config.run.draw
        return train, val, classes

    def build_split(self, name: str, classes: Classes) -> Split:
        split = build_split(self.config.data, name, classes)
        split.dataset.shown = self.config.run.draw
        return split

    def read_classes(self) -> Classes:
        return read_file_classes(self.config.data, "val")

    def read_output(self, output: Any, classes: Classes) -> PanopticMap:
        from mmdet.structures import INSTANCE_OFFSET  # here: import_mmdet() must come first

        codes = output.pred_panoptic_seg.sem_seg[0].cpu().numpy()
        return from_codes(codes, void=len(classes.all), base=INSTANCE_OFFSET)

    def score_image(self, truth: PanopticMap, found: PanopticMap) -> dict[int, panoptic_quality.Row]:
        return panoptic_quality.image_quality(truth, found)

    def score(self, images: Sequence[dict[int, Any]], classes: Classes) -> tuple[dict[str, float], dict[str, Any]]:
        table = panoptic_quality.add_up(images, len(classes.all))
        return (
            panoptic_quality.quality_metrics(table, len(classes.things)),
            panoptic_quality.quality_by_class(table, classes.all),
        )

    def pack(self, found: PanopticMap) -> Any:
        return pack(found.pixels.astype(np.uint16)), found.labels, found.crowd

    def unpack(self, packed: Any) -> PanopticMap:
        pixels, labels, crowd = packed
        return PanopticMap(pixels=unpack(pixels, np.uint16).astype(np.int32), labels=labels, crowd=crowd)

    def regions(self, found: PanopticMap) -> tuple[np.ndarray, np.ndarray]:
        return found.pixels, found.labels

    def result(self, found: PanopticMap, classes: Classes) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The PNG and the segments in COCO's form: segment k has the id k."""
        segments = []
        for number, label in enumerate(found.labels.tolist(), 1):
            mask = (found.pixels == number).astype(np.uint8)
            segments.append(
                dict(
                    id=number,
                    category_id=classes.category_ids[label],
                    category=classes.all[label],
                    area=int(mask.sum()),
                    bbox=list(cv2.boundingRect(mask)),
                )
            )
        return encode_png(found.pixels), segments
