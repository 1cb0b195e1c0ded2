"""The data of a run: two splits, their classes, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.annotation_table import AnnotationTable, Arrays, pack_objects, pack_segments
from engine.data.cleaning import clean
from engine.data.coco import build_dataset, check_same_classes, read_classes, settle_file_names
from engine.data.node_share import shared_by_node
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
        # First one rank writes, then one rank of each other node, unless it finds the folder on a disk that they share.
        with distributed.together():
            if distributed.rank() == 0:
                write_shapes(settings, progress=True)
        with distributed.together():
            if distributed.local_rank() == 0:
                write_shapes(settings)
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


def read_table(data: DataConfig, files: SplitConfig, *, training: bool) -> AnnotationTable:
    """The same as flat arrays. One rank of each node reads the file; all ranks call this."""

    def packed() -> Arrays:
        content = read_content(data, files, training=training)
        return (
            pack_segments(content) if data.task == "panoptic" else pack_objects(content, masks=data.task == "instance")
        )

    return AnnotationTable(shared_by_node(packed, f"annotation file {files.annotation_path}"))


def read_file_classes(data: DataConfig, name: str) -> Classes:
    """The classes in a split's annotation file."""
    path = split_files(data)[name].annotation_path
    return read_classes(read_annotations(path), panoptic=data.task == "panoptic")


def build_split(data: DataConfig, name: str, classes: Classes) -> Split:
    """One split for evaluation, for a model that knows `classes`."""
    files = split_files(data)[name]
    table = read_table(data, files, training=False)
    _check_classes(data, classes, table, files)
    return _split(data, files, classes, table, training=False)


def build_data(data: DataConfig) -> tuple[Split, Split, Classes]:
    files = split_files(data)
    tables = {name: read_table(data, split, training=name == "train") for name, split in files.items()}
    classes = _classes_of(data, tables["train"])
    _check_classes(data, classes, tables["val"], files["val"])
    train, val = (
        _split(data, files[name], classes, tables[name], training=name == "train") for name in ("train", "val")
    )
    return train, val, classes


def _classes_of(data: DataConfig, table: AnnotationTable) -> Classes:
    return read_classes({"categories": table.categories}, panoptic=data.task == "panoptic")


def _check_classes(data: DataConfig, classes: Classes, table: AnnotationTable, files: SplitConfig) -> None:
    check_same_classes(classes, _classes_of(data, table), files.annotation_path)


def _split(data: DataConfig, files: SplitConfig, classes: Classes, table: AnnotationTable, *, training: bool) -> Split:
    dataset = build_dataset(data, files, classes, training=training, table=table)
    # Panoptic truth is in maps of pixels, which the data set reads.
    return Split(dataset=dataset, files=files, truth=None if training or data.task == "panoptic" else table)
