"""Images with one class each: from one folder per class, or objects cropped from a detection data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.annotation_table import Arrays, pack_json, unpack_json
from engine.data.cleaning import clean
from engine.data.coco import check_same_classes, read_classes, settle_file_names
from engine.data.image_files import check_sample
from engine.data.node_share import shared_by_node
from engine.data.types import Classes
from engine.errors import ConfigError, DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
CROP_MARGIN = 1.25  # side of the square around an object, in units of the longer side of its box


@dataclass(frozen=True, kw_only=True)
class LabelledSample:
    """The number of an image, and its class if that is known."""

    img_id: int
    label: int | None


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The images of a split. Loader processes share arrays but not lists: ImageNet-22K has 14 million images."""

    folder: str
    names: np.ndarray  # bytes, relative to the folder
    labels: np.ndarray | None = None
    boxes: np.ndarray | None = None  # x1, y1, x2, y2 of the crop

    def path(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[index]))


class LabelledImages:
    """A listing as a data set for the loaders: transformed images with their samples."""

    def __init__(self, listing: Listing, transform: Callable[[Image.Image], Any]) -> None:
        self.listing, self.transform = listing, transform

    def __len__(self) -> int:
        return len(self.listing.names)

    def get_data_info(self, index: int) -> dict[str, Any]:
        return dict(img_path=self.listing.path(index), img_id=index + 1)

    def picture(self, index: int) -> Image.Image:
        with Image.open(self.listing.path(index)) as image:
            if self.listing.boxes is None:
                return image.convert("RGB")
            image = ImageOps.exif_transpose(image).convert("RGB")  # boxes are those of the image as it is shown
        x1, y1, x2, y2 = self.listing.boxes[index].tolist()
        return image.crop((max(x1, 0), max(y1, 0), min(x2, image.width), min(y2, image.height)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.listing.labels
        sample = LabelledSample(img_id=index + 1, label=None if labels is None else int(labels[index]))
        return {"inputs": self.transform(self.picture(index)), "data_samples": sample}


def image_transform(data: DataConfig, model_name: str, *, training: bool) -> Callable[[Image.Image], Any]:
    """timm's transform for a timm model: its mean, standard deviation and interpolation, with our settings."""
    # Here, because only classification needs timm.
    from timm.data import create_transform, resolve_data_config
    from timm.models import get_pretrained_cfg

    settings = data.classification
    try:
        known = get_pretrained_cfg(model_name)
    except RuntimeError as error:
        raise ConfigError(f'timm has no model "{model_name}" ({error})') from None
    resolved = resolve_data_config(
        {"img_size": settings.image_size, "crop_pct": settings.eval_crop},
        pretrained_cfg=known.to_dict() if known is not None else None,
    )
    if not training:
        return create_transform(**resolved)
    try:
        return create_transform(
            **resolved,
            is_training=True,
            scale=tuple(settings.crop_scale),
            hflip=data.flip,
            color_jitter=settings.color_jitter or None,
            auto_augment=settings.auto_augment,
            re_prob=settings.random_erasing,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:  # from timm's parsing of auto_augment
        raise ConfigError(
            f'data.classification.auto_augment "{settings.auto_augment}" is not understood by timm '
            f'({type(error).__name__}: {error}): give for instance "rand-m9-mstd0.5"'
        ) from None


def list_files(paths: Sequence[Path]) -> Listing:
    """Images without known classes."""
    return Listing(folder="", names=np.array([os.fsencode(path) for path in paths]))


def list_split(files: SplitConfig, classes: Classes | None) -> tuple[Listing, Classes]:
    """A split and its classes. With the training classes given, the split must have the same, and labels follow their
    order."""
    if files.annotations is None:
        # Only one rank lists the folder: millions of names for every rank would stall a shared file system.
        with distributed.together():
            found = list_class_folders(Path(files.images)) if distributed.rank() == 0 else None
        listing, own = distributed.broadcast_object(found)
    else:
        listing, own = list_objects(files)
    if classes is None:
        return listing, own
    check_same_classes(
        classes, own, files.annotations or files.images, kind="annotations" if files.annotations else "folders"
    )
    place = {name: label for label, name in enumerate(classes.things)}
    labels = np.array([place[name] for name in own.things])[listing.labels]
    return replace(listing, labels=labels), classes


def list_class_folders(folder: Path) -> tuple[Listing, Classes]:
    """`folder/CLASS/*.JPEG`, as in ImageNet: classes and images sorted by name."""
    if not folder.is_dir():
        raise DataError(f"image folder {folder} does not exist: check data.root and the split's images")
    names: list[bytes] = []
    counts: dict[str, int] = {}
    try:
        for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
            files = [e.name for e in os.scandir(folder / name) if e.name.lower().endswith(IMAGE_SUFFIXES)]
            if not files:
                raise DataError(f"class folder {folder / name} holds no image ({', '.join(IMAGE_SUFFIXES)})")
            names += [os.fsencode(os.path.join(name, file)) for file in sorted(files)]
            counts[name] = len(files)
    except OSError as error:
        raise DataError(f"image folder {error.filename or folder} cannot be read: {error.strerror}") from None
    if not counts:
        raise DataError(
            f"{folder} holds no class folders: the images of each class lie in a folder of its name, "
            f"such as {folder}/cat/1.jpg"
        )
    labels = np.repeat(np.arange(len(counts)), list(counts.values()))
    listing = Listing(folder=str(folder), names=np.array(names), labels=labels)
    return listing, Classes(tuple(counts), (), tuple(range(1, len(counts) + 1)))


def list_objects(files: SplitConfig) -> tuple[Listing, Classes]:
    """The objects of a COCO file, each with a square around it. Crowds and very thin objects are left out.

    One rank of each node reads the file.
    """
    arrays = shared_by_node(lambda: _pack_crops(files), f"annotation file {files.annotation_path}")
    listing = Listing(folder=files.images, names=arrays["names"], labels=arrays["labels"], boxes=arrays["boxes"])
    return listing, read_classes(unpack_json(arrays["categories"]), panoptic=False)


def _pack_crops(files: SplitConfig) -> Arrays:
    content, report = clean(read_annotations(files.annotation_path), files.annotation_path, masks=False, training=True)
    for line in report.lines():
        distributed.say(f"data    {line}")
    settle_file_names(content, files.images)
    classes = read_classes(content, panoptic=False)
    if not Path(files.images).is_dir():
        raise DataError(f"image folder {files.images} does not exist: check data.root and the split's images")
    check_sample(content["images"].__getitem__, len(content["images"]), files)
    images = {image["id"]: os.fsencode(image["file_name"]) for image in content["images"]}
    place = {category: label for label, category in enumerate(classes.category_ids)}
    names, labels, boxes = [], [], []
    for annotation in content["annotations"]:
        x, y, width, height = annotation["bbox"]
        if not annotation.get("iscrowd") and min(width, height) >= 2:
            half = CROP_MARGIN * max(width, height) / 2
            names.append(images[annotation["image_id"]])
            labels.append(place[annotation["category_id"]])
            boxes.append((x + width / 2 - half, y + height / 2 - half, x + width / 2 + half, y + height / 2 + half))
    if not names:
        raise DataError(f"no image of {files.annotations} has an object that could be cut out")
    return dict(
        names=np.array(names),
        labels=np.array(labels),
        boxes=np.array(boxes).round().astype(np.int32),
        categories=pack_json({"categories": content["categories"]}),
    )
