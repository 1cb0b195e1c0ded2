"""Mean intersection over union of class maps, with mmseg's names and meaning: mIoU, mAcc, aAcc, in percent.

Pixels without a class in the truth do not count, whatever was predicted there. Of class c with I pixels found right,
T in the truth and P predicted: IoU = I / (T + P - I), Acc = I / T. Means leave out classes for which that is 0 / 0;
aAcc is the share of all pixels found right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Row = tuple[int, int, int]  # pixels found right, of the truth, predicted


def image_areas(truth: np.ndarray, found: np.ndarray, *, ignored: int) -> dict[int, Row]:
    """What one image adds to the table of each class that it shows."""
    counted = truth != ignored
    truth, found = truth[counted], found[counted]
    size = 1 + int(max(truth.max(initial=0), found.max(initial=0)))
    areas = [np.bincount(part, minlength=size) for part in (truth[truth == found], truth, found)]
    return {int(label): tuple(int(area[label]) for area in areas) for label in np.flatnonzero(areas[1] + areas[2])}


def add_up(images: Iterable[Mapping[int, Row]], classes: int) -> np.ndarray:
    """The table of a data set, a row for each class."""
    table = np.zeros((classes, 3), np.int64)
    for rows in images:
        for label, row in rows.items():
            table[label] += row
    return table


def class_iou(table: np.ndarray) -> np.ndarray:
    """IoU and Acc in percent, a row for each class; NaN where there is nothing to divide by."""
    right, truth, found = table.T.astype(float)
    with np.errstate(invalid="ignore"):
        return 100 * np.stack([right / (truth + found - right), right / truth], 1)


def iou_metrics(table: np.ndarray) -> dict[str, float]:
    """-1 where no pixel has a class."""
    iou, accuracy = class_iou(table).T
    pixels = table[:, 1].sum()
    if not pixels:
        return {"mIoU": -1.0, "mAcc": -1.0, "aAcc": -1.0}
    return {
        "mIoU": float(np.nanmean(iou)),
        "mAcc": float(np.nanmean(accuracy)),
        "aAcc": float(100 * table[:, 0].sum() / pixels),
    }


def iou_by_class(table: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of every class that was seen, IoU and, where the truth has it, Acc."""
    return {
        name: {key: float(value) for key, value in zip(("IoU", "Acc"), values) if not np.isnan(value)}
        for name, values in zip(names, class_iou(table))
        if not np.isnan(values[0])
    }
