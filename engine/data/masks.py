"""Masks of objects in COCO's two forms, polygons and run lengths: what of them can be used, or why nothing can."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

# Why a mask cannot be used, after "of 100 boxes, 3 ...".
MALFORMED = "with a malformed mask"
FEW_POINTS = "with a polygon of fewer than 3 points"
FAR_OUTSIDE = "with a polygon far outside the image"
NO_FIT = "with a run-length mask that does not fit the image"
EMPTY = "with an empty mask"

MASK_FAULTS = (MALFORMED, FEW_POINTS, FAR_OUTSIDE, NO_FIT, EMPTY)


def usable_mask(segmentation: Any, height: int, width: int) -> tuple[Any, str | None]:
    """The mask without the polygons that are none, or the reason why nothing of it can be used."""
    if isinstance(segmentation, dict):
        return segmentation, _runs_fault(segmentation, height, width)
    if not isinstance(segmentation, list) or not all(isinstance(part, list) for part in segmentation):
        return None, MALFORMED
    faults = [_polygon_fault(part, height, width) for part in segmentation]
    if not any(faults):
        return segmentation, None
    kept = [part for part, fault in zip(segmentation, faults) if fault is None]
    return kept, None if kept else next(fault for fault in faults if fault)


def _polygon_fault(points: list[Any], height: int, width: int) -> str | None:
    if not set(map(type, points)) <= {int, float}:
        return MALFORMED
    if len(points) < 6:
        return FEW_POINTS
    xs, ys = points[0::2], points[1::2]
    # pycocotools follows an outline pixel by pixel, in memory, however far it leads. NaN is not between either.
    near = all(-width <= x <= 2 * width for x in xs) and all(-height <= y <= 2 * height for y in ys)
    if not near:
        return FAR_OUTSIDE if all(map(_finite, chain(xs, ys))) else MALFORMED
    return MALFORMED if len(points) % 2 else None


def _finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _runs_fault(runs: dict[str, Any], height: int, width: int) -> str | None:
    """pycocotools trusts run lengths: those that are too long write beyond the mask."""
    counts, size = runs.get("counts"), runs.get("size")
    if isinstance(counts, str):
        counts = _decompress(counts)
    if counts is None or not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        return MALFORMED
    if not isinstance(size, list) or not set(map(type, size)) <= {int}:
        return MALFORMED
    if size != [height, width] or min(counts, default=0) < 0 or sum(counts) != height * width:
        return NO_FIT
    return None if any(counts[1::2]) else EMPTY


def _decompress(text: str) -> list[int] | None:
    """The run lengths in COCO's compressed text; None if it is none.

    A character carries five bits of a number, low bits first, and a sixth that says whether more follow. The last one's
    highest bit is the sign. From the fourth number on, the difference to the number two places before is stored.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > 60:
            return None
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return None if shift else counts
