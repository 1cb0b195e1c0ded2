"""Panoptic quality: PQ, SQ and RQ of all classes, of things and of stuff, and of each class.

A segment t of the truth and a segment p of the prediction match if they have the same class and

    IoU = |t n p| / (|t| + |p| - |t n p| - |p n void|) > 1/2.

A segment has at most one match. For a class with TP matches, FP predictions without a match, and FN segments of the
truth without a match

    SQ = sum of IoU / TP,    RQ = TP / (TP + FP/2 + FN/2),    PQ = SQ RQ.

Means over classes leave out those that are neither in the truth nor in the predictions. A crowd segment of the truth is
neither matched nor missed. A prediction without a match is not counted as wrong if more than half of it is on void and
on crowds of its class. This follows Kirillov et al., Panoptic Segmentation (2019), and COCO's evaluation. If an image
has several crowds of one class, COCO's evaluation uses only one of them; COCO itself has at most one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from engine.data.panoptic_map import PanopticMap

# For one class: sum of the IoU of matches, number of matches, predictions without a match, truth without a match.
Row = tuple[float, int, int, int]


def image_quality(truth: PanopticMap, found: PanopticMap) -> dict[int, Row]:
    """The contribution of one image to the row of each class in it."""
    wide = len(found.labels) + 1
    overlap = np.bincount(
        (truth.pixels.astype(np.int64) * wide + found.pixels).ravel(), minlength=(len(truth.labels) + 1) * wide
    ).reshape(-1, wide)
    truth_area, found_area = overlap.sum(1)[1:], overlap.sum(0)[1:]
    void, inside = overlap[0, 1:], overlap[1:, 1:]
    same = truth.labels[:, None] == found.labels
    union = truth_area[:, None] + found_area - inside - void
    iou = np.where(same & ~truth.crowd[:, None], inside / np.maximum(union, 1), 0.0)
    match = iou > 0.5
    excused = void + (inside * (same & truth.crowd[:, None])).sum(0)
    wrong = (found_area > 0) & ~match.any(0) & (2 * excused <= found_area)
    missed = (truth_area > 0) & ~match.any(1) & ~truth.crowd
    rows: dict[int, Row] = {}
    for label in np.union1d(truth.labels, found.labels).tolist():
        of_class = match & (truth.labels == label)[:, None]
        row = (
            float(iou[of_class].sum()),
            int(of_class.sum()),
            int((wrong & (found.labels == label)).sum()),
            int((missed & (truth.labels == label)).sum()),
        )
        if any(row):
            rows[label] = row
    return rows


def add_up(images: Iterable[Mapping[int, Row]], classes: int) -> np.ndarray:
    """The table of a data set, a row for each class."""
    table = np.zeros((classes, 4))
    for rows in images:
        for label, row in rows.items():
            table[label] += row
    return table


def class_quality(table: np.ndarray) -> np.ndarray:
    """PQ, SQ and RQ in percent, a row for each class; NaN for a class that never occurs."""
    total, matches, wrong, missed = table.T
    weight = matches + wrong / 2 + missed / 2
    seen = weight > 0
    quality = np.full((len(table), 3), np.nan)
    quality[seen, 0] = 100 * total[seen] / weight[seen]
    quality[seen, 1] = 100 * total[seen] / np.maximum(matches[seen], 1)
    quality[seen, 2] = 100 * matches[seen] / weight[seen]
    return quality


def quality_metrics(table: np.ndarray, things: int) -> dict[str, float]:
    """Metrics in percent under mmdet's names: all classes, things (the first ones), stuff. -1 if none occurs."""
    quality = class_quality(table)
    metrics = {}
    for suffix, part in (("", quality), ("_th", quality[:things]), ("_st", quality[things:])):
        part = part[~np.isnan(part[:, 0])]
        for name, values in zip(("PQ", "SQ", "RQ"), part.T):
            metrics[name + suffix] = float(values.mean()) if len(values) else -1.0
    return metrics


def quality_by_class(table: np.ndarray, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measures and counts of every class that occurs."""
    return {
        name: dict(
            PQ=float(quality[0]),
            SQ=float(quality[1]),
            RQ=float(quality[2]),
            matched=int(row[1]),
            wrong=int(row[2]),
            missed=int(row[3]),
        )
        for name, quality, row in zip(names, class_quality(table), table)
        if not np.isnan(quality[0])
    }
