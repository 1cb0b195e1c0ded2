"""How many images and classes a run has: from its files where they are, else from what is known of public data sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from engine.config import RunConfig
from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.build import split_files
from engine.data.cleaning import clean
from engine.data.coco import images_with_objects, read_classes
from engine.data.panoptic_segments import check_segments
from engine.data.shapes_drawing import STUFF, THINGS
from engine.data.types import Classes
from engine.errors import UserError
from engine.tasks.base import UsualData
from engine.tasks.registry import task_of

_COCO_ALL = 118_287  # images of COCO 2017, those without an object included (`data.keep_empty`)


class Known(NamedTuple):
    """Numbers of training and validation images and of classes, and where they come from."""

    train: int
    val: int | None  # None where it is not known
    things: int
    stuff: int
    source: str


def known_data(config: RunConfig, *, images: int | None = None, classes: int | None = None) -> Known:
    """Numbers given by the user win; `images` is the number of training images."""
    for name, value in (("--images", images), ("--classes", classes)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be a whole number >= 1, got {value}")
    found = _from_files(config.data, count=images is None) or _public(config)
    if found is None:
        if images is None or classes is None:
            missing = "images" if images is None else "classes"
            raise UserError(
                "the data of this config is not on this machine and not a public set that is known here: give "
                f"--{missing}, the number of training {missing}"
            )
        found = Known(images, None, classes, 0, "as given")
    source = "as given" if images else found.source
    return found._replace(train=images or found.train, things=classes or found.things, source=source)


def _from_files(data: DataConfig, *, count: bool) -> Known | None:
    """`count` leaves out the images without objects, as training does. This needs the annotations."""
    leave_out = count and not data.keep_empty
    if data.dataset == "shapes":
        train, semantic = data.shapes.train_images, data.task == "semantic"
        if leave_out and data.task in ("detection", "instance", "panoptic"):  # drawn now instead of by the run
            train = _counted(data, split_files(data)["train"], leave_out=True)[0]
        things, stuff = len(THINGS) + semantic * len(STUFF), len(STUFF) if data.task == "panoptic" else 0
        return Known(train, data.shapes.val_images, things, stuff, "drawn")
    splits = [split for split in (data.train, data.val) if split is not None and split.annotations is not None]
    if data.dataset != "coco" or not all(Path(str(split.annotations)).is_file() for split in splits):
        return None
    (train, classes), (val, _) = (_counted(data, s, leave_out=leave_out and s is data.train) for s in splits)
    return Known(train, val, len(classes.things), len(classes.stuff), str(splits[0].annotations))


def _counted(data: DataConfig, split: SplitConfig, *, leave_out: bool) -> tuple[int, Classes]:
    """The number of images of a split, where asked without those that show no object, and its classes."""
    path = str(split.annotations)
    content = read_annotations(path)
    panoptic = data.task == "panoptic"
    classes = read_classes(content, panoptic=panoptic)
    if not leave_out:
        return len(content["images"]), classes
    if panoptic:
        check_segments(content, path)
    else:
        content, _ = clean(content, path, masks=data.task == "instance", training=True)
    return len(images_with_objects(content, classes, path, panoptic=panoptic)), classes


def _public(config: RunConfig) -> Known | None:
    """Objects365 and COCO are known by their names, ADE20K by its layout."""
    data, path = config.data, str(config.data.train and config.data.train.annotations)
    names = f"{path} {config.name} {config.detector.config}".lower()
    if data.dataset != "ade20k" and ("objects365" in names or "o365" in names):
        second = re.search(r"zhiyuan|(objects365|o365)\S*v2", names)
        version, train, val = ("v2", 1_742_292, 80_000) if second else ("v1", 638_630, 30_000)
        return Known(train, val, 365, 0, f"Objects365, {version} assumed")
    # A classifier on COCO is trained on its objects, not on its images.
    if data.dataset == "ade20k" or (data.dataset == "coco" and "train2017" in path and data.task != "classification"):
        known = Known(*task_of(config).usual_data)
        return known._replace(train=_COCO_ALL) if data.keep_empty else known
    return None


def planned_classes(known: Known | UsualData) -> Classes:
    """Classes without their names."""
    return Classes(
        tuple(f"thing {i}" for i in range(known.things)),
        tuple(f"stuff {i}" for i in range(known.stuff)),
        tuple(range(known.things + known.stuff)),
    )
