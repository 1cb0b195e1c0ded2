"""A panoptic map: every pixel belongs to one segment or to none. In memory, and as a PNG in COCO's form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True, kw_only=True)
class PanopticMap:
    """A pixel is 0 if it belongs to no segment (void), and k if it belongs to the segment with `labels[k - 1]`."""

    pixels: np.ndarray
    labels: np.ndarray  # class of each segment: things first, then stuff
    crowd: np.ndarray  # whether a segment is a group without outlines of its members; never in predictions

    def class_map(self, void: int) -> np.ndarray:
        """The class of every pixel."""
        return np.concatenate([[void], self.labels]).astype(np.int64)[self.pixels]


def from_codes(codes: np.ndarray, void: int, *, base: int) -> PanopticMap:
    """From a prediction as mmdet encodes it: class + base x instance, or `void`."""
    found, pixels = np.unique(codes, return_inverse=True)
    number = np.cumsum(found != void)
    number[found == void] = 0
    labels = found[found != void] % base
    return PanopticMap(
        pixels=number[pixels.reshape(codes.shape)].astype(np.int32),
        labels=labels.astype(np.int64),
        crowd=np.zeros(len(labels), bool),
    )


def segment_ids(png: np.ndarray) -> np.ndarray:
    """Segment id of every pixel of an RGB panoptic PNG: R + 256 G + 256^2 B."""
    png = png.astype(np.int64)
    return png[..., 0] + 256 * png[..., 1] + 256**2 * png[..., 2]


def encode_png(ids: np.ndarray) -> np.ndarray:
    """Segment ids as an RGB picture, the inverse of `segment_ids`."""
    return np.stack([ids % 256, ids // 256 % 256, ids // 256**2], -1).astype(np.uint8)


def read_ids(path: str | Path) -> np.ndarray:
    """Segment id of every pixel of a panoptic PNG file; OSError if it is not a picture."""
    with Image.open(path) as image:
        return segment_ids(np.asarray(image.convert("RGB")))
