"""COCO-style data for mmdet: its classes, transforms and data sets."""

from __future__ import annotations

import os
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_table import AnnotationTable
from engine.data.augmentation import build_augmentation
from engine.data.image_files import check_sample
from engine.data.types import Classes
from engine.errors import DataError, nearest


def read_classes(content: dict[str, Any], *, panoptic: bool) -> Classes:
    categories = content["categories"]
    things = [c for c in categories if not panoptic or c.get("isthing", 1)]
    stuff = [c for c in categories if panoptic and not c.get("isthing", 1)]
    return Classes(
        tuple(c["name"] for c in things), tuple(c["name"] for c in stuff), tuple(c["id"] for c in things + stuff)
    )


def check_same_classes(train: Classes, val: Classes, val_path: str, *, kind: str = "annotations") -> None:
    if set(train.all) != set(val.all):
        odd = sorted(set(train.all) ^ set(val.all))[0]
        side, other = ("training", "validation") if odd in train.all else ("validation", "training")
        raise DataError(
            f'class "{odd}" is in the {side} {kind} but not in the {other} ones ({val_path})'
            + nearest(odd, set(train.all) & set(val.all))
        )


def train_pipeline(data: DataConfig, load: Any) -> list[Any]:
    """Transforms for training. `load` reads the annotations of an image."""
    if data.train_scales is not None:
        resize = dict(type="RandomResize", scale=[tuple(s) for s in data.train_scales], keep_ratio=True)
    else:
        resize = dict(type="Resize", scale=tuple(data.scale), keep_ratio=True)
    return [
        dict(type="LoadImageFromFile", backend_args=None),
        load,
        resize,
        dict(type="RandomFlip", prob=data.flip),
        *build_augmentation(data),
        dict(type="PackDetInputs"),
    ]


def test_pipeline(data: DataConfig, load_truth: Any = None) -> list[Any]:
    """Transforms for evaluation. `load_truth` loads the ground truth into `truth`, for tasks in which each rank scores
    its own images."""
    keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    return [
        dict(type="LoadImageFromFile", backend_args=None),
        dict(type="Resize", scale=tuple(data.scale), keep_ratio=True),
        *([] if load_truth is None else [load_truth]),
        dict(type="PackDetInputs", meta_keys=keys if load_truth is None else (*keys, "truth", "shown")),
    ]


def build_dataset(
    data: DataConfig, split: SplitConfig, classes: Classes, *, training: bool, table: AnnotationTable
) -> Any:
    """An mmdet data set over one split."""
    from engine.data.mmdet_coco import GigadetCoco  # here: it imports mmdet, which takes seconds

    _check_split(data, split, table)
    options: dict[str, Any] = dict(
        table=table,
        data_prefix=dict(img=split.images),
        test_mode=not training,
        filter_cfg=dict(filter_empty_gt=not data.keep_empty, min_size=0) if training else None,
    )
    if data.task == "panoptic":
        from engine.data.panoptic import LoadPanoptic, LoadTruth, PanopticCoco  # here: it imports mmdet

        assert split.panoptic is not None
        pipeline = train_pipeline(data, LoadPanoptic()) if training else test_pipeline(data, LoadTruth())
        dataset = PanopticCoco(
            classes=classes, source=split.annotation_path, folder=split.panoptic, pipeline=pipeline, **options
        )
        _refuse_empty(dataset, split.annotation_path)
        if distributed.local_rank() == 0:
            dataset.check_sample()
        return dataset
    load = dict(type="LoadAnnotations", with_bbox=True, with_mask=data.task == "instance")
    dataset = GigadetCoco(
        metainfo=dict(classes=classes.all),
        ann_file=split.annotations,
        pipeline=train_pipeline(data, load) if training else test_pipeline(data),
        **options,
    )
    _refuse_empty(dataset, split.annotation_path)
    return dataset


def _refuse_empty(images: Sized, path: str) -> None:
    if not len(images):
        raise DataError(
            f"no image of {path} has an annotated object: "
            "set data.keep_empty to true to train on empty images all the same"
        )


def images_with_objects(content: dict[str, Any], classes: Classes, path: str, *, panoptic: bool) -> set[int]:
    """The images that remain without empty ones: those with an object, or with a segment of a thing."""
    annotations = content["annotations"]
    if panoptic:
        images = {image["id"] for image in content["images"]}
        things = set(classes.category_ids[: len(classes.things)])
        annotations = [
            annotation
            for annotation in annotations
            if annotation["image_id"] in images
            and any(s["category_id"] in things and not s.get("iscrowd") for s in annotation["segments_info"])
        ]
    left = {annotation["image_id"] for annotation in annotations}
    _refuse_empty(left, path)
    return left


def _check_split(data: DataConfig, split: SplitConfig, table: AnnotationTable) -> None:
    folder = Path(split.images)
    if not folder.is_dir():
        raise DataError(f"image folder {folder} does not exist: check data.root and the split's images")
    if distributed.local_rank() == 0:  # the other ranks of a node would see the same
        check_sample(table.image, len(table), split)
    if data.task == "panoptic" and (split.panoptic is None or not Path(split.panoptic).is_dir()):
        raise DataError(
            f'data.task is "panoptic": the split needs "panoptic", the folder of PNGs, got {split.panoptic!r}'
        )


# Listed in the JSON of Objects365's second version but in none of its archives (mmdet's datasets/objects365.py).
_OBJECTS365_LACKS = (
    "patch16/objects365_v2_00908726.jpg",
    "patch6/objects365_v1_00320532.jpg",
    "patch6/objects365_v1_00320534.jpg",
)


def settle_file_names(content: dict[str, Any], folder: str) -> None:
    """Make every `file_name` relative to the image folder.

    Objects365's second version lists `images/v1/patch8/NAME.jpg`, but its archives unpack to `patch8/NAME.jpg`. They
    lack three images, which are removed with their annotations.
    """
    lacking = {
        image["id"]
        for image in content["images"]
        if image["file_name"].endswith(_OBJECTS365_LACKS) and not _is_file(folder, image["file_name"])
    }
    if len(lacking) < len(content["images"]):
        content["images"] = [image for image in content["images"] if image["id"] not in lacking]
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] not in lacking]
    first = Path(content["images"][0]["file_name"])
    if len(first.parts) > 2 and not _is_file(folder, first) and _is_file(folder, *first.parts[-2:]):
        for image in content["images"]:
            image["file_name"] = str(Path(*Path(image["file_name"]).parts[-2:]))


def _is_file(*parts: str | Path) -> bool:
    return os.path.isfile(os.path.join(*parts))  # unlike Path.is_file, no error for a name that no system takes


def landscape_flags(dataset: Any) -> Sequence[bool]:
    """Whether each image is at least as wide as tall, for grouping by aspect."""
    return dataset.landscape()
