"""All that can be known about a data set before a run: every object, every image and every map of its splits.

A run looks at every object too, but only at a sample of the images and maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.annotation_table import AnnotationTable, pack_segments
from engine.data.build import split_files
from engine.data.classification import list_class_folders
from engine.data.cleaning import clean
from engine.data.coco import build_dataset, check_same_classes, images_with_objects, read_classes, settle_file_names
from engine.data.image_files import faults_of, image_fault, known_size
from engine.data.panoptic_segments import check_segments
from engine.data.types import Classes
from engine.errors import DataError
from engine.monitoring.live import LiveLine


@dataclass(kw_only=True)
class SplitCheck:
    """What was found in a split."""

    name: str
    source: str  # its annotation file, or its folder
    facts: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # objects that a run does not use
    refusals: list[str] = field(default_factory=list)  # what a run would stop for, at its start or later
    classes: Classes | None = None


def check_data(data: DataConfig, names: Sequence[str] = ("train", "val")) -> list[SplitCheck]:
    """Check splits, and that they have the same classes."""
    checks = [_check_split(data, name, files) for name, files in split_files(data).items() if name in names]
    train, *others = checks
    for other in others:
        if train.classes is not None and other.classes is not None:
            other.refusals += _refusal(partial(check_same_classes, train.classes, other.classes, other.source))
    return checks


def _refusal(attempt: Callable[[], Any]) -> list[str]:
    try:
        attempt()
    except DataError as error:
        return [str(error)]
    return []


def _check_split(data: DataConfig, name: str, files: SplitConfig) -> SplitCheck:
    found = SplitCheck(name=name, source=files.annotations or files.images)
    check = _check_maps if data.task == "semantic" else _check_listed if files.annotations else _check_folders
    try:
        check(data, files, found)
    except DataError as error:  # without this, nothing else can be looked at
        found.refusals.insert(0, str(error))
    return found


def _check_listed(data: DataConfig, files: SplitConfig, found: SplitCheck) -> None:
    """A split with an annotation file in COCO form."""
    path, training, panoptic = files.annotation_path, found.name == "train", data.task == "panoptic"
    content = read_annotations(path)
    classes = found.classes = read_classes(content, panoptic=panoptic)
    count = f"{len(content['images']):,} images, {len(classes.all)} classes"
    if panoptic:
        found.facts += [count, *check_segments(content, path)]
    else:
        training = training or data.task == "classification"
        try:
            content, report = clean(content, path, masks=data.task == "instance", training=training)
        except DataError as error:
            found.refusals.append(str(error))
            content["annotations"] = []
        else:
            found.facts += [f"{count}, {report.boxes:,} boxes, {report.used:,} of them used ({report.crowds:,} crowds)"]
            found.facts += report.notes
            found.left_out += [
                f"{left.objects:,} {reason} ({left.example})" for reason, left in report.left_out.items()
            ]
    settle_file_names(content, files.images)
    if training and not data.keep_empty and not found.refusals:
        found.refusals += _refusal(lambda: images_with_objects(content, classes, path, panoptic=panoptic))
    if not Path(files.images).is_dir():
        raise DataError(f"image folder {files.images} does not exist: check data.root and the split's images")
    found.refusals += _faults(content["images"], lambda image: image_fault(image, files), f"{found.name} images")
    if panoptic and not found.refusals:
        table = AnnotationTable(pack_segments(content))
        dataset = build_dataset(data, files, classes, training=False, table=table)
        found.refusals += _faults(range(len(dataset)), _map_fault(dataset), f"{found.name} maps")


def _check_maps(data: DataConfig, files: SplitConfig, found: SplitCheck) -> None:
    """A split with a map of classes for each image."""
    from engine.data.semantic import ClassMapImages, read_class_table  # here: it imports mmdet, which takes seconds

    classes = found.classes = read_class_table(Path(files.annotation_path))
    dataset = ClassMapImages(data, files, classes, training=False)
    found.facts.append(f"{len(dataset):,} images with maps, {len(classes.things)} classes")
    found.refusals += _faults(range(len(dataset)), _map_fault(dataset), f"{found.name} maps")
    if not found.refusals:
        dataset.check_sample()


def _check_folders(data: DataConfig, files: SplitConfig, found: SplitCheck) -> None:
    """A split with a folder of images for each class."""
    listing, found.classes = list_class_folders(Path(files.images))
    found.facts.append(f"{len(listing.names):,} images in {len(found.classes.things)} class folders")

    def fault(place: int) -> str | None:
        return next(iter(_refusal(lambda: known_size(listing.path(place)))), None)

    found.refusals += _faults(range(len(listing.names)), fault, f"{found.name} images")


def _map_fault(dataset: Any) -> Callable[[int], str | None]:
    return lambda index: next(iter(_refusal(lambda: dataset.read_map(index))), None)


def _faults(items: Sequence[Any], fault: Callable[[Any], str | None], label: str) -> Iterator[str]:
    """The faults of the items, with a live line."""
    line = LiveLine(total=len(items), label=label, interval=max(1, len(items) // 10))
    for found in faults_of(items, fault):
        line.update()
        if found is not None:
            yield found
    line.close()
