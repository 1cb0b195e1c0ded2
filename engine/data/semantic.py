"""ADE20K as downloaded: images and PNGs of class numbers, in two folders with the same file names.

    ADEChallengeData2016/images/training/ADE_train_00000001.jpg
    ADEChallengeData2016/annotations/training/ADE_train_00000001.png      0: no class, k: class k
    ADEChallengeData2016/objectInfo150.txt                                a line for each class

Class k is label k - 1 of a model. Pixels without a class are ignored in training and in scoring.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data.classification import IMAGE_SUFFIXES
from engine.data.coco import test_pipeline, train_pipeline
from engine.data.image_files import MAP_SAMPLE, known_size, sample_of
from engine.data.types import Classes
from engine.errors import DataError
from models.mmdet_setup import import_mmdet

IGNORED = 255
CLASS_TABLE = "objectInfo150.txt"
UNNAMED_CLASSES = 150


def read_class_table(maps: Path) -> Classes:
    """The classes of the maps in a folder, from the table two folders above; without a table, numbered classes."""
    table = maps.parent.parent / CLASS_TABLE
    if not table.is_file():
        names = [f"class {number}" for number in range(1, UNNAMED_CLASSES + 1)]
    else:
        lines = _table_text(table).splitlines()[1:]
        rows = [line.split("\t") for line in lines if line.strip()]
        numbers = [row[0].strip() for row in rows]
        if numbers != [str(number) for number in range(1, len(rows) + 1)] or not 1 <= len(rows) < IGNORED - 1:
            raise DataError(
                f"class table {table} must have a line for each class after its heading, numbered from 1, with "
                "the name after the last tab, and at most 253 of them"
            )
        synonyms = [row[-1].strip() for row in rows]
        names = [text.split(",")[0].strip() for text in synonyms]
        if len(set(names)) != len(names):
            names = synonyms
    return Classes(tuple(names), (), tuple(range(1, len(names) + 1)))


def _table_text(table: Path) -> str:
    try:
        return table.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"class table {table} cannot be read: {error}") from None


def list_pairs(files: SplitConfig) -> list[tuple[str, str]]:
    """File names of images and of their maps, sorted. Rank 0 lists the folders and sends the names to the others."""
    with distributed.together():
        pairs = _list_pairs(Path(files.images), Path(files.annotation_path)) if distributed.rank() == 0 else None
    return distributed.broadcast_object(pairs)


def _list_pairs(images: Path, maps: Path) -> list[tuple[str, str]]:
    for folder, what in ((images, "images"), (maps, "annotations")):
        if not folder.is_dir():
            raise DataError(f"folder {folder} does not exist: check data.root and the split's {what}")
    found = sorted(name for name in os.listdir(images) if name.lower().endswith(IMAGE_SUFFIXES))
    if not found:
        raise DataError(f"folder {images} holds no image ({', '.join(IMAGE_SUFFIXES)})")
    known = set(os.listdir(maps))
    pairs = [(name, f"{Path(name).stem}.png") for name in found]
    for image, png in pairs:
        if png not in known:
            raise DataError(f"class map {maps / png} does not exist, though there is an image {images / image}")
    return pairs


def read_class_map(path: str, shape: tuple[int, int], classes: int, image: str) -> np.ndarray:
    """The label of every pixel of an image; `shape` is (height, width)."""
    try:
        with Image.open(path) as picture:
            numbers = np.asarray(picture)
    except FileNotFoundError:
        raise DataError(f"class map {path} does not exist") from None
    except OSError as error:
        raise DataError(f"class map {path} cannot be read ({error})") from None
    if numbers.ndim != 2:
        raise DataError(f"class map {path} is a picture in colours: a PNG with one number for each pixel is needed")
    if numbers.shape != shape:
        raise DataError(
            f"class map {path} has {numbers.shape[1]} x {numbers.shape[0]} pixels, but its image {image} has "
            f"{shape[1]} x {shape[0]}"
        )
    unknown = numbers[(numbers > classes) & (numbers != IGNORED)]
    if unknown.size:
        raise DataError(
            f"class map {path} has class {unknown[0]}, but there are classes 1 to {classes} (0 or {IGNORED}: none)"
        )
    # In bytes, 0 - 1 is 255, the ignored label. 255 itself becomes 254 and is set back.
    labels = numbers.astype(np.uint8) - np.uint8(1)
    labels[labels == IGNORED - 1] = IGNORED
    return labels


class LoadClassMap:
    """Reads an image's labels. mmdet's transforms change those in `gt_seg_map`, but not those in `truth`."""

    def __init__(self, classes: int, key: str) -> None:
        self.classes, self.key = classes, key

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        labels = read_class_map(results["png"], results["ori_shape"], self.classes, results["img_path"])
        return {**results, self.key: labels}


class ClassMapImages:
    """Images with their maps, as a data set for the loaders. The first `shown` of them are marked for drawing."""

    shown = 0

    def __init__(self, data: DataConfig, files: SplitConfig, classes: Classes, *, training: bool) -> None:
        import_mmdet()
        # Here, because import_mmdet comes first and takes seconds.
        from mmengine.dataset import Compose

        self.files, self.pairs = files, np.array(list_pairs(files))  # an array: loader processes share it
        self.classes = len(classes.things)
        self.pipeline = Compose(
            train_pipeline(data, LoadClassMap(self.classes, "gt_seg_map"))
            if training
            else test_pipeline(data, LoadClassMap(self.classes, "truth"))
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def get_data_info(self, index: int) -> dict[str, Any]:
        image, png = self.pairs[index]
        return dict(
            img_path=os.path.join(self.files.images, image),
            png=os.path.join(self.files.annotation_path, png),
            img_id=index + 1,
            shown=index < self.shown,
        )

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(self.get_data_info(index))

    def read_map(self, index: int) -> np.ndarray:
        """The labels of an image at its own size; DataError if there is none or it does not fit."""
        info = self.get_data_info(index)
        width, height = known_size(info["img_path"])
        return read_class_map(info["png"], (height, width), self.classes, info["img_path"])

    def check_sample(self) -> None:
        """Refuse maps that cannot be used, or in which no pixel has a class, as far as a sample shows."""
        places = sample_of(len(self), MAP_SAMPLE)
        # Together, because the ranks meet again where the other split is listed. One rank of each node looks.
        with distributed.together():
            if distributed.local_rank() == 0 and not any((self.read_map(k) != IGNORED).any() for k in places):
                raise DataError(
                    f"class maps in {self.files.annotations}: in none of {len(places)} of them has a pixel a class "
                    f"(all are 0 or {IGNORED}), so there is nothing to train on or to score"
                )
