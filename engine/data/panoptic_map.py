"""A panoptic map: every pixel belongs to one segment or to none. In memory, and as the PNG that COCO ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True, kw_only=True)
class PanopticMap:
    """`pixels` is 0 where there is no segment (void), and k where there is the one with `labels[k - 1]`."""

    pixels: np.ndarray
    labels: np.ndarray  # class of each segment: things first, then stuff
    crowd: np.ndarray  # whether it is a group whose members nobody outlined; never so in predictions

    def class_map(self, void: int) -> np.ndarray:
        """The class of every pixel."""
        return np.concatenate([[void], self.labels]).astype(np.int64)[self.pixels]


def from_codes(codes: np.ndarray, void: int, *, base: int) -> PanopticMap:
    """A prediction as mmdet codes it: class + base x instance, `void` for nothing."""
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
    """The RGB picture of segment ids: what `segment_ids` reads."""
    return np.stack([ids % 256, ids // 256 % 256, ids // 256**2], -1).astype(np.uint8)


def read_ids(path: str | Path) -> np.ndarray:
    """Segment id of every pixel of a panoptic PNG file; OSError where it is no picture."""
    with Image.open(path) as image:
        return segment_ids(np.asarray(image.convert("RGB")))
