"""The objects of an annotation file that can be used, and a count of those that cannot, by reason.

Training leaves out what mmdet's reader leaves out in silence; scoring keeps what COCO's evaluation keeps. What is left
is therefore read as it stands, and a file with faults is read exactly as the same file without the faulty objects.
A file of which nothing is left, or whose boxes are in another form, is refused with the likely reason.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.data.faults import (
    NEGATIVE,
    NO_AREA,
    NO_BOX,
    OUTSIDE,
    REASONS,
    REPEATED,
    UNKNOWN_CATEGORY,
    UNKNOWN_IMAGE,
    USED,
    Survey,
    where_is,
)
from engine.data.masks import usable_mask
from engine.errors import DataError, first_of


class Left(NamedTuple):
    """How many objects were left out for a reason, and where the first of them is."""

    objects: int
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
        lines = [f"of {self.boxes:,} boxes of {file} left out: {', '.join(self.reasons())}"] if self.left_out else []
        return lines + [f"{file}: {note}" for note in self.notes]

    def reasons(self) -> list[str]:
        return [f"{left.objects:,} {reason} ({left.example})" for reason, left in self.left_out.items()]


def clean(content: dict[str, Any], path: str, *, masks: bool, training: bool) -> tuple[dict[str, Any], Report]:
    """The content with the objects that can be used, and a report. `masks`: the task needs them.

    The content is one that `read_annotations` has checked.
    """
    annotations = content["annotations"]
    report = Report(path=path, boxes=len(annotations))
    survey = Survey(content, training=training)
    reasons = np.concatenate([np.zeros(0, np.int8), *survey.all_reasons(annotations)])
    _mark_repeats(annotations, reasons, report)
    survey.refuse_other_forms(path)
    if masks:
        _refuse_without_masks(annotations, reasons, path)
        _check_masks(content, reasons)
    kept = [annotations[place] for place in np.flatnonzero(reasons == USED).tolist()]
    if survey.to_settle:
        kept = [_settled(annotation) for annotation in kept]
    report.used, report.crowds = len(kept), sum(1 for annotation in kept if annotation.get("iscrowd"))
    for number, reason in enumerate(REASONS):
        places = np.flatnonzero(reasons == number)
        if places.size:
            report.left_out[reason] = Left(int(places.size), where_is(annotations, int(places[0])))
    report.left_out = dict(sorted(report.left_out.items(), key=lambda item: -item[1].objects))
    _note(survey, report, training=training)
    if annotations and report.used == report.crowds:
        raise DataError(_nothing_left(content, report, training=training))
    return {**content, "annotations": kept}, report


def _mark_repeats(annotations: list[dict[str, Any]], reasons: np.ndarray, report: Report) -> None:
    """Mark annotations that say again what the first one with their id says. Others with its id are objects too."""
    shared, example = 0, ""
    for place, first in _same_id(annotations):
        if annotations[place] == annotations[first]:
            reasons[place] = REASONS.index(REPEATED)
        elif reasons[place] == USED:
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
    used = np.flatnonzero(reasons == USED).tolist()
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
    for place in np.flatnonzero(reasons == USED).tolist():
        annotation = annotations[place]
        image = images[annotation["image_id"]]
        mask, fault = usable_mask(annotation["segmentation"], image["height"], image["width"])
        if fault is not None:
            reasons[place] = REASONS.index(fault)
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


def _note(survey: Survey, report: Report, *, training: bool) -> None:
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
    text += ", ".join(report.reasons())
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
