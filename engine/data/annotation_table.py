"""The images and objects of an annotation file as flat arrays: what a process keeps of it in place of Python's objects.

A box of Python's dictionaries takes one to two kilobytes, here 46 bytes. The ranks of a node map the same arrays, and
their loader processes share them too (`engine.data.node_share`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
_CHUNK = 500_000  # objects at a time: their numbers as Python's objects are many times larger than the arrays


def pack_texts(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as one array of bytes, and where each of them begins and ends in it."""
    data, ends = bytearray(), [0]
    for text in texts:
        data += text.encode()
        ends.append(len(data))
    return np.frombuffer(data, np.uint8), np.array(ends, np.int64)


def pack_json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def unpack_json(data: np.ndarray) -> Any:
    return json.loads(data.tobytes())


def pack_objects(content: dict[str, Any], *, masks: bool) -> Arrays:
    """Cleaned annotations: the objects of each image one after another, in the order of the file."""
    rows = {image["id"]: row for row, image in enumerate(content["images"])}
    numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
    annotations, chunks = content["annotations"], []
    texts = _TextColumn() if masks else None
    for chunk in _chunks(annotations):
        boxes = _numbers(chain.from_iterable(a["bbox"] for a in chunk), np.float64, 4 * len(chunk)).reshape(-1, 4)
        areas = (a.get("area", a["bbox"][2] * a["bbox"][3]) for a in chunk)
        chunks.append(
            dict(
                row=_numbers((rows[a["image_id"]] for a in chunk), np.int32, len(chunk)),
                category=_numbers((numbers[a["category_id"]] for a in chunk), np.int32, len(chunk)),
                box=boxes,
                area=_numbers(areas, np.float64, len(chunk)),
                crowd=_numbers((bool(a.get("iscrowd")) for a in chunk), np.bool_, len(chunk)),
                ignore=_numbers((bool(a.get("ignore")) for a in chunk), np.bool_, len(chunk)),
            )
        )
        if texts is not None:
            texts.add(json.dumps(a["segmentation"], separators=(",", ":")) for a in chunk)
    empty = dict(row=np.int32, category=np.int32, box=np.float64, area=np.float64, crowd=np.bool_, ignore=np.bool_)
    columns: Arrays = {}
    for name, kind in empty.items():
        columns[name] = np.concatenate([np.zeros((0, 4) if name == "box" else 0, kind), *(c.pop(name) for c in chunks)])
    row = columns.pop("row")
    order = np.argsort(row, kind="stable") if (np.diff(row) < 0).any() else None
    if order is not None:
        for name in list(columns):
            columns[name] = columns[name][order]
    if texts is not None:
        columns["mask"], columns["mask_ends"] = texts.packed(order)
    return {**_pack_images(content), **columns, "ends": _ends(np.bincount(row, minlength=len(rows)))}


def pack_segments(content: dict[str, Any]) -> Arrays:
    """Checked annotations of a panoptic file: the segments of each image, and the name of its PNG."""
    numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
    by_image = {annotation["image_id"]: annotation for annotation in content["annotations"]}
    entries = [by_image[image["id"]] for image in content["images"]]
    segments = [segment for entry in entries for segment in entry["segments_info"]]
    png, png_ends = pack_texts(entry["file_name"] for entry in entries)
    return {
        **_pack_images(content),
        "png": png,
        "png_ends": png_ends,
        "segment": np.array([segment["id"] for segment in segments], np.int64),
        "category": np.array([numbers[segment["category_id"]] for segment in segments], np.int32),
        "crowd": np.array([bool(segment.get("iscrowd")) for segment in segments], np.bool_),
        "ends": _ends([len(entry["segments_info"]) for entry in entries]),
    }


def _pack_images(content: dict[str, Any]) -> Arrays:
    images = content["images"]
    name, name_ends = pack_texts(image["file_name"] for image in images)
    ids = [image["id"] for image in images]
    categories = [{key: c[key] for key in ("id", "name", "isthing") if key in c} for c in content["categories"]]
    arrays = {
        "height": _numbers((image["height"] for image in images), np.int32, len(images)),
        "width": _numbers((image["width"] for image in images), np.int32, len(images)),
        "name": name,
        "name_ends": name_ends,
        "categories": pack_json(categories),
    }
    try:
        if type(ids[0]) is not int:
            raise OverflowError
        return {**arrays, "id": _numbers(ids, np.int64, len(ids))}
    except OverflowError:  # texts, or numbers of more than 64 bits
        id_text, id_ends = pack_texts(json.dumps(value) for value in ids)
        return {**arrays, "id_text": id_text, "id_ends": id_ends}


def _numbers(values: Iterable[Any], kind: Any, count: int) -> np.ndarray:
    return np.fromiter(values, kind, count)


def _ends(counts: Any) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _chunks(entries: Iterable[Any]) -> Iterable[list[Any]]:
    left = iter(entries)
    while chunk := list(islice(left, _CHUNK)):
        yield chunk


class _TextColumn:
    """A text for each object, to be put in another order at the end."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def add(self, texts: Iterable[str]) -> None:
        self._texts += [text.encode() for text in texts]

    def packed(self, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        texts = self._texts if order is None else [self._texts[place] for place in order.tolist()]
        return np.frombuffer(b"".join(texts), np.uint8), _ends([len(text) for text in texts])


class AnnotationTable:
    """Images, and what is annotated in them, read from the arrays on demand."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays
        self.categories: list[dict[str, Any]] = unpack_json(arrays["categories"])
        self.ends = arrays["ends"]

    def __len__(self) -> int:
        return len(self.arrays["height"])

    def image(self, row: int) -> dict[str, Any]:
        """An entry of the file's list of images."""
        arrays = self.arrays
        return dict(
            id=self.image_id(row),
            file_name=self.text("name", row),
            height=int(arrays["height"][row]),
            width=int(arrays["width"][row]),
        )

    def image_id(self, row: int) -> int | str:
        return int(self.arrays["id"][row]) if "id" in self.arrays else json.loads(self.text("id_text", row, "id_ends"))

    def text(self, name: str, row: int, ends: str = "") -> str:
        ends = ends or f"{name}_ends"
        start, end = self.arrays[ends][row : row + 2].tolist()
        return self.arrays[name][start:end].tobytes().decode()

    def span(self, row: int) -> slice:
        """The places of an image's objects or segments in the arrays."""
        start, end = self.ends[row : row + 2].tolist()
        return slice(start, end)

    def objects(self, row: int) -> list[dict[str, Any]]:
        """The objects of an image, with the number of their category in place of its id, and no field left out."""
        span, arrays = self.span(row), self.arrays
        keys = ("category", "box", "area", "crowd", "ignore")
        found = [
            dict(bbox=box, category_id=category, area=area, iscrowd=int(crowd), ignore=int(ignore))
            for category, box, area, crowd, ignore in zip(*(arrays[key][span].tolist() for key in keys))
        ]
        if "mask" in arrays:
            for place, entry in enumerate(found, span.start):
                entry["segmentation"] = json.loads(self.text("mask", place))
        return found

    def with_objects(self) -> np.ndarray:
        """The rows of images with at least one object."""
        return np.flatnonzero(np.diff(self.ends) > 0)

    def content(self, wanted: Callable[[int], bool] = lambda number: True) -> dict[str, Any]:
        """The annotation file as dictionaries again, for scoring: objects of the wanted categories (by number) only."""
        ids = [category["id"] for category in self.categories]
        chosen = np.array([wanted(number) for number in range(len(ids))])
        images = [self.image(row) for row in range(len(self))]
        annotations = [
            {**entry, "category_id": ids[entry["category_id"]], "image_id": images[row]["id"]}
            for row in self._rows_with(chosen)
            for entry in self.objects(row)
            if chosen[entry["category_id"]]
        ]
        return {"images": images, "categories": self.categories, "annotations": annotations}

    def _rows_with(self, chosen: np.ndarray) -> Sequence[int]:
        return range(len(self)) if chosen.all() else self.rows_of(np.flatnonzero(chosen[self.arrays["category"]]))

    def rows_of(self, places: np.ndarray) -> Sequence[int]:
        """The rows of the images to which objects belong, each once."""
        return np.unique(np.searchsorted(self.ends, places, side="right") - 1).tolist()
