"""Mean intersection over union of class maps, with mmseg's names and meaning: mIoU, mAcc, aAcc, in percent.

Pixels without a class in the truth do not count. For a class with I correct pixels, T pixels in the truth and P
predicted pixels: IoU = I / (T + P - I), Acc = I / T. Means leave out classes for which that is 0 / 0. aAcc is the share
of correct pixels among all pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Row = tuple[int, int, int]  # pixels: correct, in the truth, predicted


def image_areas(truth: np.ndarray, found: np.ndarray, *, ignored: int) -> dict[int, Row]:
    """The contribution of one image to the row of each class in it."""
    counted = truth != ignored
    truth, found = truth[counted], found[counted]
    size = 1 + int(max(truth.max(initial=0), found.max(initial=0)))
    right, wanted, predicted = (np.bincount(part, minlength=size) for part in (truth[truth == found], truth, found))
    labels = np.flatnonzero(wanted + predicted).tolist()
    return {label: (int(right[label]), int(wanted[label]), int(predicted[label])) for label in labels}


def add_up(images: Iterable[Mapping[int, Row]], classes: int) -> np.ndarray:
    """The table of a data set, a row for each class."""
    table = np.zeros((classes, 3), np.int64)
    for rows in images:
        for label, row in rows.items():
            table[label] += row
    return table


def class_iou(table: np.ndarray) -> np.ndarray:
    """IoU and Acc in percent, a row for each class; NaN for 0 / 0."""
    right, truth, found = table.T.astype(float)
    with np.errstate(invalid="ignore"):
        return 100 * np.stack([right / (truth + found - right), right / truth], 1)


def iou_metrics(table: np.ndarray) -> dict[str, float]:
    """mIoU, mAcc and aAcc; -1 if no pixel has a class."""
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
    """IoU of every class in the truth or the predictions, and Acc of every class in the truth."""
    return {
        name: {key: float(value) for key, value in zip(("IoU", "Acc"), values) if not np.isnan(value)}
        for name, values in zip(names, class_iou(table))
        if not np.isnan(values[0])
    }
