"""The objects of an annotation file that can be used, and a count of those that cannot, by reason.

Training leaves out what mmdet's reader leaves out in silence; scoring keeps what COCO's evaluation keeps. What is left
is therefore read as it stands, and a file with faults is read exactly as the same file without the faulty objects.
A file of which nothing is left, or whose boxes are in another form, is refused with the likely reason.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.data.annotation_file import is_number
from engine.data.masks import MASK_FAULTS, usable_mask
from engine.errors import DataError, first_of

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
_REASONS = (
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
_USED = -1
_CHUNK = 500_000  # annotations at a time: their numbers as arrays would otherwise take gigabytes for Objects365
_HUGE = 1e7  # pixels
_NO_BOX = (float("nan"),) * 4
_AREA_OF_BOX = 1.0  # stands for an area that is not given, because any above 0 is as good here


class Left(NamedTuple):
    """How many objects were left out for a reason, and where the first of them is."""

    count: int
    example: str


@dataclass(kw_only=True)
class Report:
    """What became of the objects of a file."""

    path: str
    boxes: int
    used: int = 0
    crowds: int = 0  # of those used
    left_out: dict[str, Left] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # odd, but used as they are

    def lines(self) -> list[str]:
        """For the start of a run: nothing if all is well."""
        file = "/".join(Path(self.path).parts[-2:])  # the files of both splits often have the same name
        lines = [f"of {self.boxes:,} boxes of {file} left out: {self.reasons()}"] if self.left_out else []
        return lines + [f"{file}: {note}" for note in self.notes]

    def reasons(self) -> str:
        return ", ".join(f"{left.count:,} {reason} ({left.example})" for reason, left in self.left_out.items())


def clean(content: dict[str, Any], path: str, *, masks: bool, training: bool) -> tuple[dict[str, Any], Report]:
    """The content with the objects that can be used, and a report. `masks`: the task needs them.

    The content is one that `read_annotations` has checked.
    """
    annotations = content["annotations"]
    report = Report(path=path, boxes=len(annotations))
    survey = _Survey(content, training=training)
    reasons = np.concatenate([np.zeros(0, np.int8), *survey.all_reasons(annotations)])
    _mark_repeats(annotations, reasons, report)
    survey.refuse_other_forms(path)
    if masks:
        _refuse_without_masks(annotations, reasons, path)
        _check_masks(content, reasons)
    kept = [annotations[place] for place in np.flatnonzero(reasons == _USED).tolist()]
    if survey.to_settle:
        kept = [_settled(annotation) for annotation in kept]
    report.used, report.crowds = len(kept), sum(1 for annotation in kept if annotation.get("iscrowd"))
    for number, reason in enumerate(_REASONS):
        places = np.flatnonzero(reasons == number)
        if places.size:
            report.left_out[reason] = Left(int(places.size), _where(annotations, int(places[0])))
    report.left_out = dict(sorted(report.left_out.items(), key=lambda item: -item[1].count))
    _note(survey, report, training=training)
    if annotations and report.used == report.crowds:
        raise DataError(_nothing_left(content, report, training=training))
    return {**content, "annotations": kept}, report


class _Survey:
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
                self.cut_example = _where(annotations, start + self.cut_place)

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
            reasons = np.full(count, _USED, np.int8)
            for reason, where in reversed(faults):
                reasons[where] = _REASONS.index(reason)
            self._count(boxes, width, height, known=finite & (rows >= 0), used=reasons == _USED)
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


def _mark_repeats(annotations: list[dict[str, Any]], reasons: np.ndarray, report: Report) -> None:
    """Mark annotations that say again what the first one with their id says. Others with its id are objects too."""
    shared, example = 0, ""
    for place, first in _same_id(annotations):
        if annotations[place] == annotations[first]:
            reasons[place] = _REASONS.index(REPEATED)
        elif reasons[place] == _USED:
            shared += 1
            example = example or f"annotations[{first}] and annotations[{place}]"
    if shared:
        report.notes.append(
            f"{shared:,} annotations share their id with an earlier one ({example}); all are used, and numbered anew "
            "for scoring"
        )


def _same_id(annotations: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Places of annotations whose id stands before them, and the first place of that id."""
    ids = [annotation.get("id") for annotation in annotations]
    if not ids:
        return
    if set(map(type, ids)) == {int}:
        try:
            numbers = np.fromiter(ids, np.int64, len(ids))
        except OverflowError:
            pass
        else:
            order = np.argsort(numbers, kind="stable")
            new = np.concatenate([[True], np.diff(numbers[order]) != 0])
            first = order[np.flatnonzero(new)[np.cumsum(new) - 1]]
            yield from zip(order[~new].tolist(), first[~new].tolist())
            return
    known: dict[Any, int] = {}
    for place, value in enumerate(ids):
        if value is not None and isinstance(value, Hashable):
            first_place = known.setdefault(value, place)
            if first_place != place:
                yield place, first_place


def _refuse_without_masks(annotations: list[dict[str, Any]], reasons: np.ndarray, path: str) -> None:
    used = np.flatnonzero(reasons == _USED).tolist()
    bare = [place for place in used if not annotations[place].get("segmentation")]
    if bare and len(bare) == len(used):
        raise DataError(
            f'data.task is "instance" but {path} has no masks (no "segmentation"): use data.task "detection"'
        )
    if bare:
        raise DataError(
            f'data.task is "instance" but {len(bare)} annotations of {path} have no mask, '
            f'first annotations[{bare[0]}]: give them a "segmentation" or use data.task "detection"'
        )


def _check_masks(content: dict[str, Any], reasons: np.ndarray) -> None:
    """Mark objects whose mask cannot be used, and take polygons that are none from the others."""
    images = {image["id"]: image for image in content["images"]}
    annotations = content["annotations"]
    for place in np.flatnonzero(reasons == _USED).tolist():
        annotation = annotations[place]
        image = images[annotation["image_id"]]
        mask, fault = usable_mask(annotation["segmentation"], image["height"], image["width"])
        if fault is not None:
            reasons[place] = _REASONS.index(fault)
        elif mask is not annotation["segmentation"]:
            annotations[place] = {**annotation, "segmentation": mask}


_MAY_BE_NULL = ("area", "iscrowd", "ignore")
_ID_FIELDS = ("image_id", "category_id")


def _settled(annotation: dict[str, Any]) -> dict[str, Any]:
    """As the readers take it: null says as much as nothing, and 3.0 is the id 3."""
    if all(annotation.get(key, 0) is not None for key in _MAY_BE_NULL) and not any(
        type(annotation[key]) is float for key in _ID_FIELDS
    ):
        return annotation
    said = {key: value for key, value in annotation.items() if value is not None or key not in _MAY_BE_NULL}
    return {key: int(value) if key in _ID_FIELDS and type(value) is float else value for key, value in said.items()}


def _where(annotations: list[dict[str, Any]], place: int) -> str:
    annotation = annotations[place]
    name = f"annotation {annotation['id']}" if type(annotation.get("id")) is int else f"annotations[{place}]"
    image = annotation.get("image_id")
    return f"image {image}, {name}" if type(image) in (int, str) else name


def _note(survey: _Survey, report: Report, *, training: bool) -> None:
    """Tell what is odd about objects that are used."""
    if survey.cut:
        report.notes.append(
            f"boxes that reach beyond their image by more than a pixel: {survey.cut:,} ({survey.cut_example})"
        )
    if survey.small:  # in training these are left out
        report.notes.append(f"boxes less than a pixel wide or high, scored as they are: {survey.small:,}")
    if not report.boxes and not training:
        report.notes.append("no annotations, so there is nothing to score")


def _nothing_left(content: dict[str, Any], report: Report, *, training: bool) -> str:
    """The refusal, with what is known about its cause."""
    verb = "trained on" if training else "scored"
    text = f"annotation file {report.path}: none of its {report.boxes:,} boxes can be {verb}: "
    if report.crowds:
        text += f"{report.crowds:,} are crowds" + (", " if report.left_out else "")
    text += report.reasons()
    main = next(iter(report.left_out), None)
    if report.crowds:
        return text + ': set "iscrowd" to 0 for single objects'
    advice = {
        NO_AREA: 'remove "area", and it is taken from the box',
        NO_BOX: 'give each object a "bbox", or use the data.task that the file was made for',
        OUTSIDE: "are x and y, or the images' width and height, mixed up?",
        NEGATIVE: "are the corners of the boxes mixed up?",
        UNKNOWN_CATEGORY: f"the categories are {_ids(content['categories'], 'id')}, the annotations name "
        f"{_ids(content['annotations'], 'category_id')}",
        UNKNOWN_IMAGE: f"the images are {_ids(content['images'], 'id')}, the annotations name "
        f"{_ids(content['annotations'], 'image_id')}",
    }.get(main or "")
    return text + (f"; {advice}" if advice else "")


def _ids(entries: list[dict[str, Any]], key: str) -> str:
    return first_of(list(dict.fromkeys(str(entry.get(key))[:20] for entry in entries[:1000])), 3)
