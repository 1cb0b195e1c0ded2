"""COCO-panoptic as downloaded (a JSON of segments and a folder of PNGs), for mmdet and for scoring.

mmdet's own data set (3.5.1) needs the package panopticapi, which is on no registry. It also assumes that classes are in
the order of the file's categories, and does not check whether a PNG fits its entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from engine.data.image_files import MAP_SAMPLE, known_size, sample_of
from engine.data.mmdet_coco import GigadetCoco
from engine.data.panoptic_map import PanopticMap, read_ids
from engine.data.panoptic_segments import IGNORED
from engine.data.types import Classes
from engine.errors import DataError
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.datasets.transforms import LoadAnnotations  # noqa: E402
from mmdet.structures.mask import BitmapMasks  # noqa: E402


class PanopticCoco(GigadetCoco):
    """Images with their segments. The first `shown` of them are marked for drawing."""

    shown = 0

    def __init__(self, *, classes: Classes, source: str, folder: str, **options: Any) -> None:
        self._classes, self._source, self._folder = classes, source, folder
        super().__init__(
            metainfo=dict(classes=classes.all, thing_classes=classes.things, stuff_classes=classes.stuff), **options
        )

    def _entry(self, row: int) -> dict[str, Any]:
        table, span = self.table, self.table.span(row)
        keys = ("segment", "category", "crowd")
        segments = []
        for number, category, crowd in zip(*(table.arrays[key][span].tolist() for key in keys)):
            label = self.cat2label[category]
            segments.append(
                dict(id=number, label=label, crowd=crowd, object=label < len(self._classes.things) and not crowd)
            )
        image = table.image(row)
        return dict(
            img_path=str(Path(self.data_prefix["img"]) / image["file_name"]),
            img_id=image["id"],
            height=image["height"],
            width=image["width"],
            segments=segments,
            png=str(Path(self._folder) / table.text("png", row)),
            source=self._source,
        )

    def _with_objects(self) -> np.ndarray:
        """Images without things do not count, as in mmdet's training of panoptic detectors."""
        things = len(self._classes.things)
        is_thing = np.array([self.cat2label[number] < things for number in self.cat_ids])
        arrays = self.table.arrays
        return np.array(self.table.rows_of(np.flatnonzero(is_thing[arrays["category"]] & ~arrays["crowd"])), np.int64)

    def get_data_info(self, idx: int) -> dict[str, Any]:
        return {**super().get_data_info(idx), "shown": idx < self.shown}

    def read_map(self, index: int) -> PanopticMap:
        """The map of an image at its own size; DataError if there is none or it does not fit."""
        info = self.get_data_info(index)
        width, height = known_size(info["img_path"])
        return read_truth(info, (height, width))

    def check_sample(self) -> None:
        """Refuse PNGs that cannot be used, as far as a sample shows."""
        for place in sample_of(len(self), MAP_SAMPLE):
            self.read_map(place)


def read_truth(info: dict[str, Any], shape: tuple[int, int]) -> PanopticMap:
    """The panoptic map of an image of the data set; `shape` is (height, width)."""
    path = info["png"]
    try:
        ids = read_ids(path)
    except FileNotFoundError:
        raise DataError(f"panoptic PNG {path} does not exist, though {info['source']} lists it") from None
    except OSError as error:
        raise DataError(f"panoptic PNG {path} cannot be read ({error})") from None
    if ids.shape != shape:
        raise DataError(
            f"panoptic PNG {path} has {ids.shape[1]} x {ids.shape[0]} pixels, but its image "
            f"{info['img_path']} has {shape[1]} x {shape[0]}"
        )
    found, pixels = np.unique(ids, return_inverse=True)
    number = {segment["id"]: place for place, segment in enumerate(info["segments"], 1)} | {0: 0}
    unlisted = [value for value in found.tolist() if value not in number]
    if unlisted:
        raise DataError(
            f"panoptic PNG {path} has pixels of segment {unlisted[0]}, which {info['source']} does not list"
        )
    pixels = np.array([number[value] for value in found.tolist()], np.int32)[pixels.reshape(ids.shape)]
    return PanopticMap(
        pixels=pixels,
        labels=np.array([s["label"] for s in info["segments"]], np.int64),
        crowd=np.array([s["crowd"] for s in info["segments"]], bool),
    )


class LoadPanoptic(LoadAnnotations):
    """For training: boxes, masks and labels of the objects, and the class of every pixel."""

    def __init__(self) -> None:
        super().__init__(with_bbox=True, with_label=True, with_mask=True, with_seg=True)

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        truth = read_truth(results, results["ori_shape"])
        masks, instances = [], []
        for place, segment in enumerate(results["segments"], 1):
            mask = (truth.pixels == place).astype(np.uint8)
            if segment["object"] and mask.any():
                x, y, width, height = cv2.boundingRect(mask)
                masks.append(mask)
                instances.append(dict(bbox=[x, y, x + width, y + height], bbox_label=segment["label"], ignore_flag=0))
        results["instances"] = instances
        self._load_bboxes(results)
        self._load_labels(results)
        results["gt_masks"] = BitmapMasks(masks, *truth.pixels.shape)
        results["gt_seg_map"] = truth.class_map(IGNORED).astype(np.uint8)
        return results


class LoadTruth:
    """For scoring: the map at the image's original size."""

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        return {**results, "truth": read_truth(results, results["ori_shape"])}
