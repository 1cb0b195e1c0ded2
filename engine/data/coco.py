"""COCO-style data for mmdet: class names come from the file, and each fault is reported in one sentence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config.schema import DataConfig, SplitConfig
from engine.data.augmentation import build_augmentation
from engine.data.types import Classes
from engine.errors import DataError, nearest


def read_annotations(path: str) -> dict[str, Any]:
    """The content of an annotation file, checked for what any COCO reader needs."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise DataError(f"annotation file {path} does not exist: check data.root and the split's annotations") from None
    except json.JSONDecodeError as error:
        raise DataError(f"annotation file {path} is not JSON: {error.msg} at line {error.lineno}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"annotation file {path} cannot be read: {error}") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f'annotation file {path} is not in COCO form: it has no list "{key}"')
    if not content["images"]:
        raise DataError(f"annotation file {path} lists no images")
    if not content["categories"]:
        raise DataError(f"annotation file {path} lists no categories")
    _check_entries(content, path)
    return content


def _check_entries(content: dict[str, Any], path: str) -> None:
    """Check that every entry has what readers expect. The error names the place of the first that has not."""
    for key, needed in (
        ("images", ("id", "file_name", "height", "width")),
        ("categories", ("id", "name")),
        ("annotations", ("image_id",)),
    ):
        for place, entry in enumerate(content[key]):
            lacking = [n for n in needed if n not in entry] if isinstance(entry, dict) else list(needed)
            if key == "annotations" and not lacking and "segments_info" not in entry:
                lacking = [] if "category_id" in entry else ["category_id"]
                box = entry.get("bbox", [0, 0, 0, 0])
                if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, (int, float)) for v in box):
                    raise DataError(
                        f"annotation file {path}: annotations[{place}].bbox must be [x, y, width, height], got {box!r}"
                    )
            if lacking:
                raise DataError(f'annotation file {path} is not in COCO form: {key}[{place}] has no "{lacking[0]}"')
    for key, field in (("images", "id"), ("categories", "id"), ("categories", "name")):
        values = [entry[field] for entry in content[key]]
        if len(set(values)) != len(values):
            twice = next(value for value, count in Counter(values).items() if count > 1)
            raise DataError(f"annotation file {path}: the {field} {twice!r} stands twice in {key}")


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
    data: DataConfig, split: SplitConfig, classes: Classes, *, training: bool, content: dict[str, Any]
) -> Any:
    """An mmdet data set over one split."""
    from engine.data.mmdet_coco import GigadetCoco  # here: it imports mmdet, which takes seconds

    _check_split(data, split, content)
    if training and not data.keep_empty:
        images_with_objects(content, classes, split.annotation_path)  # mmdet fails on an empty list (3.5.1)
    options: dict[str, Any] = dict(
        content=content,
        data_prefix=dict(img=split.images),
        test_mode=not training,
        filter_cfg=dict(filter_empty_gt=not data.keep_empty, min_size=0) if training else None,
    )
    if data.task == "panoptic":
        from engine.data.panoptic import LoadPanoptic, LoadTruth, PanopticCoco  # here: it imports mmdet

        assert split.panoptic is not None
        pipeline = train_pipeline(data, LoadPanoptic()) if training else test_pipeline(data, LoadTruth())
        return PanopticCoco(
            classes=classes, source=split.annotation_path, folder=split.panoptic, pipeline=pipeline, **options
        )
    load = dict(type="LoadAnnotations", with_bbox=True, with_mask=data.task == "instance")
    return GigadetCoco(
        metainfo=dict(classes=classes.all),
        ann_file=split.annotations,
        pipeline=train_pipeline(data, load) if training else test_pipeline(data),
        **options,
    )


def images_with_objects(content: dict[str, Any], classes: Classes, path: str) -> set[int]:
    """The images that remain without empty ones: those with a box, or with a segment of a thing."""
    images = {image["id"] for image in content["images"]}
    things = set(classes.category_ids[: len(classes.things)])
    left = {
        annotation["image_id"]
        for annotation in content["annotations"]
        if annotation["image_id"] in images
        and (
            "bbox" in annotation
            and annotation["category_id"] in things
            or any(
                segment["category_id"] in things and not segment.get("iscrowd")
                for segment in annotation.get("segments_info", ())
            )
        )
    }
    if not left:
        raise DataError(
            f"no image of {path} has an annotated object: "
            "set data.keep_empty to true to train on empty images all the same"
        )
    return left


def _check_split(data: DataConfig, split: SplitConfig, content: dict[str, Any]) -> None:
    folder = Path(split.images)
    if not folder.is_dir():
        raise DataError(f"image folder {folder} does not exist: check data.root and the split's images")
    first = folder / content["images"][0].get("file_name", "")
    if not first.is_file():
        raise DataError(f"image {first} does not exist, though {split.annotations} lists it")
    if data.task == "instance":
        bare = [place for place, a in enumerate(content["annotations"]) if not a.get("segmentation")]
        if len(bare) == len(content["annotations"]):
            raise DataError(
                f'data.task is "instance" but {split.annotations} has no masks (no "segmentation"): '
                'use data.task "detection"'
            )
        if bare:
            raise DataError(
                f'data.task is "instance" but {len(bare)} annotations of {split.annotations} have no mask, '
                f'first annotations[{bare[0]}]: give them a "segmentation" or use data.task "detection"'
            )
    if data.task == "panoptic":
        if split.panoptic is None or not Path(split.panoptic).is_dir():
            raise DataError(
                f'data.task is "panoptic": the split needs "panoptic", the folder of PNGs, got {split.panoptic!r}'
            )
        from engine.data.panoptic import check_segments  # here: it imports mmdet

        check_segments(content, split.annotation_path)


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
        if str(image["file_name"]).endswith(_OBJECTS365_LACKS) and not Path(folder, image["file_name"]).is_file()
    }
    if len(lacking) < len(content["images"]):
        content["images"] = [image for image in content["images"] if image["id"] not in lacking]
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] not in lacking]
    first = Path(content["images"][0]["file_name"])
    if len(first.parts) > 2 and not (Path(folder) / first).is_file() and Path(folder, *first.parts[-2:]).is_file():
        for image in content["images"]:
            image["file_name"] = str(Path(*Path(image["file_name"]).parts[-2:]))


def landscape_flags(dataset: Any) -> Sequence[bool]:
    """Whether each image is at least as wide as tall, for grouping by aspect."""
    infos = (dataset.get_data_info(index) for index in range(len(dataset)))
    return [info["width"] >= info["height"] for info in infos]
