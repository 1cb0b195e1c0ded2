"""How many images and classes a run has: from its files where they are, else from what is known of public data sets."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config import RunConfig
from engine.config.schema import DataConfig, SplitConfig
from engine.data.build import split_files
from engine.data.coco import images_with_objects, read_annotations, read_classes
from engine.data.shapes_drawing import STUFF, THINGS
from engine.data.types import Classes
from engine.errors import UserError

COCO_STUFF = 53


class Known(NamedTuple):
    """Images that are trained on and validated on, numbers of classes, and where the numbers come from."""

    train: int
    val: int | None  # None where it is not known
    things: int
    stuff: int
    source: str


# Of COCO those with annotations, as `data.keep_empty` false leaves them: of 118,287.
_PUBLIC = {
    "coco": Known(117_266, 5_000, 80, 0, "COCO 2017"),
    "panoptic": Known(118_287, 5_000, 80, COCO_STUFF, "COCO 2017"),
    "ade20k": Known(20_210, 2_000, 150, 0, "ADE20K"),
    "objects365": Known(638_630, 30_000, 365, 0, "Objects365 v1, about"),
}
_COCO_ALL = 118_287


def known_data(config: RunConfig, *, images: int | None = None, classes: int | None = None) -> Known:
    """Numbers given by the user win; `images` are those that are trained on."""
    for name, value in (("--images", images), ("--classes", classes)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be a whole number >= 1, got {value}")
    found = _from_files(config, count=images is None) or _public(config)
    if found is None and (images is None or classes is None):
        raise UserError(
            f"the data of this config is not on this machine and not a public set that is known here: give "
            f"{'--images' if images is None else '--classes'}, the number of training "
            f"{'images' if images is None else 'classes'}"
        )
    found = found or Known(images, None, classes, 0, "as given")
    return found._replace(
        train=images or found.train, things=classes or found.things, source="as given" if images else found.source
    )


def _from_files(config: RunConfig, *, count: bool) -> Known | None:
    """`count` leaves out the images that training leaves out, for which the annotations have to be read."""
    data = config.data
    leave = count and not data.keep_empty
    if data.dataset == "shapes":
        known = _drawn(data)
        if leave and data.task in ("detection", "instance", "panoptic"):  # they are drawn now rather than by the run
            return known._replace(train=_counted(data, split_files(data)["train"])[0])
        return known
    if data.dataset != "coco" or not all(Path(split.annotations).is_file() for split in (data.train, data.val)):
        return None
    train, classes = _counted(data, data.train, leave_out_empty=leave)
    val, _ = _counted(data, data.val, leave_out_empty=False)
    return Known(train, val, len(classes.things), len(classes.stuff), data.train.annotations)


def _drawn(data: DataConfig) -> Known:
    stuff = len(STUFF) if data.task in ("panoptic", "semantic") else 0
    things = len(THINGS) + (stuff if data.task == "semantic" else 0)
    return Known(
        data.shapes.train_images, data.shapes.val_images, things, 0 if data.task == "semantic" else stuff, "drawn"
    )


def _counted(data: DataConfig, split: SplitConfig, *, leave_out_empty: bool = True) -> tuple[int, Classes]:
    """Images of a split, where asked without those that show no object, and its classes."""
    content = read_annotations(split.annotations)
    classes = read_classes(content, panoptic=data.task == "panoptic")
    return len(
        images_with_objects(content, classes, split.annotations) if leave_out_empty else content["images"]
    ), classes


def _public(config: RunConfig) -> Known | None:
    data = config.data
    names = " ".join(
        str(x).lower() for x in (data.train and data.train.annotations, config.name, config.detector.config)
    )
    if data.dataset == "ade20k":
        return _PUBLIC["ade20k"]
    if "objects365" in names or "o365" in names:
        return _PUBLIC["objects365"]
    if data.dataset == "coco" and data.train is not None and "train2017" in str(data.train.annotations):
        known = _PUBLIC["panoptic" if data.task == "panoptic" else "coco"]
        return known._replace(train=_COCO_ALL) if data.keep_empty else known
    return None


def planned_classes(known: Known) -> Classes:
    """Classes without their names."""
    return Classes(
        tuple(f"thing {i}" for i in range(known.things)),
        tuple(f"stuff {i}" for i in range(known.stuff)),
        tuple(range(known.things + known.stuff)),
    )
