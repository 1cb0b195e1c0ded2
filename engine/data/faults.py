"""Which objects of an annotation file cannot be used, and why; many at a time, for there may be tens of millions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from engine.data.annotation_file import is_number, shown
from engine.data.masks import MASK_FAULTS
from engine.errors import DataError

REPEATED = "given twice with the same id"
NO_BOX = 'without a "bbox"'
UNKNOWN_IMAGE = "of an unknown image"
UNKNOWN_CATEGORY = "of an unknown category"
WRONG_FLAG = "whose iscrowd or ignore is neither 0 nor 1"
NOT_FINITE = "with NaN, infinite or huge numbers"
NEGATIVE = "of negative width or height"
WRONG_AREA = "whose area is no number from 0 up"
OUTSIDE = "outside the image"
# Only training leaves these out.
SMALL = "less than a pixel wide or high"
NO_AREA = "of area 0"
IGNORED = 'marked "ignore"'

# The first reason that holds is told.
REASONS = (
    REPEATED,
    NO_BOX,
    UNKNOWN_IMAGE,
    UNKNOWN_CATEGORY,
    WRONG_FLAG,
    NOT_FINITE,
    NEGATIVE,
    WRONG_AREA,
    OUTSIDE,
    SMALL,
    NO_AREA,
    IGNORED,
    *MASK_FAULTS,
)
USED = -1
_CHUNK = 500_000  # annotations at a time: their numbers as arrays would otherwise take gigabytes for Objects365
_HUGE = 1e7  # pixels
_NO_BOX = (float("nan"),) * 4
_AREA_OF_BOX = 1.0  # stands for an area that is not given, because any above 0 is as good here


class Survey:
    """Finds the reason for leaving out each object of a file, and counts what tells the form of its boxes."""

    def __init__(self, content: dict[str, Any], *, training: bool) -> None:
        self.training = training
        images = content["images"]
        self.rows = {image["id"]: row for row, image in enumerate(images)}
        self.sides = np.array([(image["width"], image["height"]) for image in images], np.float64)
        self.categories = {category["id"]: 0 for category in content["categories"]}
        self.to_settle = False  # whether a field is null, or an id written as 3.0
        # Of the boxes in known images and with finite numbers: all, those within 0 and 1, those that reach beyond their
        # image, and those that would fit as two corners.
        self.finite = self.unit = self.beyond = self.corners = 0
        # Of the boxes that are used: those that reach beyond their image, and those smaller than a pixel.
        self.cut = self.cut_place = self.small = 0
        self.cut_example = ""

    def all_reasons(self, annotations: list[dict[str, Any]]) -> Iterator[np.ndarray]:
        for start in range(0, len(annotations), _CHUNK):
            yield self._reasons(annotations[start : start + _CHUNK])
            if self.cut and not self.cut_example:
                self.cut_example = where_is(annotations, start + self.cut_place)

    def _reasons(self, annotations: list[dict[str, Any]]) -> np.ndarray:
        count = len(annotations)
        rows = self._looked_up(annotations, "image_id", self.rows)
        unknown = self._looked_up(annotations, "category_id", self.categories) < 0
        crowd, ignore = (_flags(self._given(annotations, key, 0)) for key in ("iscrowd", "ignore"))
        areas = _areas(self._given(annotations, "area", _AREA_OF_BOX))
        given = [a.get("bbox") for a in annotations]
        boxes, absent = _boxes(given), np.fromiter((box is None for box in given), bool, count)

        x, y, w, h = boxes.T
        width, height = self.sides[rows].T  # of unknown images those of the last, which are not used
        with np.errstate(invalid="ignore", over="ignore"):
            finite = (np.abs(boxes) <= _HUGE).all(1)
            wide = np.maximum(0, np.minimum(x + w, width) - np.maximum(x, 0))
            high = np.maximum(0, np.minimum(y + h, height) - np.maximum(y, 0))
            small = (w < 1) | (h < 1)
            faults = [
                (NO_BOX, absent),
                (UNKNOWN_IMAGE, rows < 0),
                (UNKNOWN_CATEGORY, unknown),
                (WRONG_FLAG, (crowd < 0) | (ignore < 0)),
                (NOT_FINITE, ~finite),
                (NEGATIVE, (w < 0) | (h < 0)),
                (WRONG_AREA, areas < 0),
                (OUTSIDE, (wide * high == 0) & ~small),
            ]
            if self.training:
                faults += [(SMALL, small), (NO_AREA, areas == 0), (IGNORED, ignore > 0)]
            reasons = np.full(count, USED, np.int8)
            for reason, where in reversed(faults):
                reasons[where] = REASONS.index(reason)
            self._count(boxes, width, height, known=finite & (rows >= 0), used=reasons == USED)
        return reasons

    def _given(self, annotations: list[dict[str, Any]], key: str, absent: Any) -> list[Any]:
        values = [annotation.get(key, absent) for annotation in annotations]
        self.to_settle |= None in values
        return values

    def _looked_up(self, annotations: list[dict[str, Any]], key: str, places: dict[Any, int]) -> np.ndarray:
        """The place of the entry that each annotation names, -1 if there is none."""
        names = [annotation.get(key) for annotation in annotations]
        if not set(map(type, names)) <= {int, str}:
            self.to_settle = True
            # True would be found as 1, and a list cannot be looked up.
            names = [name if isinstance(name, str) or is_number(name) else None for name in names]
        return np.fromiter((places.get(name, -1) for name in names), np.int64, len(names))

    def _count(
        self, boxes: np.ndarray, width: np.ndarray, height: np.ndarray, *, known: np.ndarray, used: np.ndarray
    ) -> None:
        """`known`: in a known image, with finite numbers."""
        x, y, w, h = boxes.T
        self.finite += int(known.sum())
        self.unit += int((known & (boxes >= 0).all(1) & (boxes <= 1).all(1) & (w > 0) & (h > 0)).sum())
        self.corners += int((known & (x >= 0) & (y >= 0) & (w > x) & (h > y) & (w <= width) & (h <= height)).sum())
        beyond = (x + w > width + 1) | (y + h > height + 1) | (x < -1) | (y < -1)
        self.beyond += int((known & beyond).sum())
        cut = np.flatnonzero(used & beyond)
        if cut.size and not self.cut:
            self.cut_place = int(cut[0])
        self.cut += cut.size
        self.small += int((used & ((w < 1) | (h < 1))).sum())

    def refuse_other_forms(self, path: str) -> None:
        """Boxes that are not x, y, width and height in pixels. One fault decides nothing, only the file as a whole."""
        if self.unit > self.finite / 2:
            raise DataError(
                f"annotation file {path}: {self.unit:,} of {self.finite:,} boxes lie between 0 and 1 and look "
                "normalised, but COCO's are in pixels: multiply them by their image's width and height"
            )
        if self.finite >= 4 and self.beyond >= self.finite / 4 and self.corners >= 0.99 * self.finite:
            raise DataError(
                f"annotation file {path}: the boxes look like [x1, y1, x2, y2], for as [x, y, width, height] "
                f"{self.beyond:,} of {self.finite:,} reach beyond their image: "
                "write width and height in place of x2 and y2"
            )


def _flags(values: list[Any]) -> np.ndarray:
    """0 or 1 for each value, 0 for none, -1 for what is neither."""
    if set(map(type, values)) <= {int, bool, type(None)} and set(values) <= {0, 1, None}:
        return np.fromiter((value or 0 for value in values), np.int8, len(values))
    good = (int, float, bool, type(None))
    return np.array([int(v or 0) if type(v) in good and v in (0, 1, None) else -1 for v in values], np.int8)


def _boxes(given: list[Any]) -> np.ndarray:
    flat = chain.from_iterable(_NO_BOX if box is None else box for box in given)
    try:
        return np.fromiter(flat, np.float64, 4 * len(given)).reshape(-1, 4)
    except OverflowError:  # a whole number of hundreds of digits
        rows = [_NO_BOX if box is None else [_as_float(value) for value in box] for box in given]
        return np.array(rows, np.float64).reshape(-1, 4)


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _areas(values: list[Any]) -> np.ndarray:
    """Areas, and -1 for what is no number from 0 up."""
    if not set(map(type, values)) <= {int, float}:
        values = [_AREA_OF_BOX if v is None else v if is_number(v) else -1.0 for v in values]
    try:
        areas = np.fromiter(values, np.float64, len(values))
    except OverflowError:
        areas = np.array([_as_float(value) for value in values])
    areas[~np.isfinite(areas)] = -1
    return areas


def where_is(annotations: list[dict[str, Any]], place: int) -> str:
    """`image 5, annotation 77`, or the place in the file if they have no such names."""
    annotation = annotations[place]
    number, image = annotation.get("id"), annotation.get("image_id")
    name = f"annotation {shown(number)}" if type(number) is int else f"annotations[{place}]"
    return f"image {shown(image)}, {name}" if type(image) in (int, str) else name
