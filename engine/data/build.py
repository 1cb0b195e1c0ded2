"""The data of a run: two splits, their classes, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.cleaning import clean
from engine.data.coco import build_dataset, check_same_classes, read_classes, settle_file_names
from engine.data.panoptic_segments import check_segments
from engine.data.shapes import ShapesSettings, write_shapes
from engine.data.types import Classes, Split
from engine.errors import DataError


def split_files(data: DataConfig) -> dict[str, SplitConfig]:
    """The files of train and val. Those of the embedded data set are written first, by one rank of each node."""
    if data.dataset != "shapes":
        assert data.train is not None and data.val is not None
        return {"train": data.train, "val": data.val}
    try:
        settings = ShapesSettings(**data.shapes.model_dump())
        # One rank of a node writes; the others find the finished folder or get the same error.
        with distributed.together():
            if distributed.local_rank() == 0:
                write_shapes(settings, progress=distributed.rank() == 0)
        root = write_shapes(settings)
    except (OSError, ValueError) as error:
        raise DataError(f"the shapes data set cannot be written: {error}") from None
    return {split: _shapes_split(root, split, data.task) for split in ("train", "val")}


def _shapes_split(root: Path, split: str, task: str) -> SplitConfig:
    folder = root / "annotations"
    if task == "semantic":
        ade, name = root / "ADEChallengeData2016", {"train": "training", "val": "validation"}[split]
        return SplitConfig(annotations=str(ade / "annotations" / name), images=str(ade / "images" / name))
    if task == "panoptic":
        return SplitConfig(
            annotations=str(folder / f"panoptic_{split}2017.json"),
            images=str(root / f"{split}2017"),
            panoptic=str(folder / f"panoptic_{split}2017"),
        )
    return SplitConfig(annotations=str(folder / f"instances_{split}2017.json"), images=str(root / f"{split}2017"))


def read_content(data: DataConfig, files: SplitConfig, *, training: bool) -> dict[str, Any]:
    """The annotation file of a split: only objects that can be used, and image names relative to the image folder.

    What is left out is told once, by the first rank.
    """
    content = read_annotations(files.annotation_path)
    if data.task == "panoptic":
        lines = check_segments(content, files.annotation_path)
    else:
        masks = data.task == "instance"
        content, report = clean(content, files.annotation_path, masks=masks, training=training)
        lines = report.lines()
    for line in lines:
        distributed.say(f"data    {line}")
    settle_file_names(content, files.images)
    return content


def build_split(data: DataConfig, name: str, classes: Classes) -> Split:
    """One split for evaluation, for a model that knows `classes`."""
    files = split_files(data)[name]
    content = read_content(data, files, training=False)
    check_same_classes(classes, read_classes(content, panoptic=data.task == "panoptic"), files.annotation_path)
    dataset = build_dataset(data, files, classes, training=False, content=content)
    return Split(dataset=dataset, content=content, files=files)


def build_data(data: DataConfig) -> tuple[Split, Split, Classes]:
    files = split_files(data)
    contents = {name: read_content(data, split, training=name == "train") for name, split in files.items()}
    panoptic = data.task == "panoptic"
    classes = read_classes(contents["train"], panoptic=panoptic)
    check_same_classes(classes, read_classes(contents["val"], panoptic=panoptic), files["val"].annotation_path)
    datasets = {
        name: build_dataset(data, files[name], classes, training=name == "train", content=contents[name])
        for name in files
    }
    # No second copy of the training annotations is kept: for Objects365 that would be gigabytes on every rank.
    return (
        Split(dataset=datasets["train"], content={}, files=files["train"]),
        Split(dataset=datasets["val"], content=contents["val"], files=files["val"]),
        classes,
    )
