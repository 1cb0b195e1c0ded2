"""How large micro-batches are: sizes of images after resizing, padded to the largest of a micro-batch.

Ranks wait for each other, so a step takes as long as the rank with the most pixels: its size is drawn here too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.config.schema import DataConfig
from engine.errors import UserError

# Width over height of COCO-like photographs and their shares, for data that is not at hand. [our estimate]
ASPECTS = ((4 / 3, 0.52), (3 / 2, 0.20), (1.0, 0.04), (3 / 4, 0.16), (2 / 3, 0.08))
DIVISOR = 32  # mmdet pads to it
_DRAWS = 4096


class Size(NamedTuple):
    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width

    @classmethod
    def padded(cls, height: float, width: float) -> Size:
        return cls(*_padded(np.array([height, width])).tolist())


class ImageSizes:
    """Padded sizes of micro-batches, drawn once with a fixed seed. `largest` is the size that must fit: one image of
    the longest side each way, unless all images of a micro-batch have the same orientation."""

    def __init__(self, data: DataConfig, micro: int, *, fixed: Size | None = None) -> None:
        random = np.random.default_rng(0)
        fixed = fixed or _fixed_size(data)
        if fixed is not None:
            self.largest = fixed
            heights, widths = (np.full((_DRAWS, micro), side) for side in fixed)
        else:
            scales = data.train_scales or [data.scale]
            long, short = max(max(scale) for scale in scales), max(min(scale) for scale in scales)
            self.largest = Size.padded(long if micro > 1 and not data.group_by_aspect else short, long)
            aspects = random.choice([a for a, _ in ASPECTS], (_DRAWS, micro), p=[p for _, p in ASPECTS])
            if data.group_by_aspect:
                aspects = np.where((aspects >= 1) == (aspects[:, :1] >= 1), aspects, 1 / aspects)
            heights, widths = _resized(data, aspects, random)
        self.heights, self.widths = _padded(heights.max(1)), _padded(widths.max(1))
        self.pixels = self.heights * self.widths

    @property
    def mean(self) -> Size:
        """The drawn micro-batch whose number of pixels is nearest to the mean."""
        place = int(np.abs(self.pixels - self.pixels.mean()).argmin())
        return Size(int(self.heights[place]), int(self.widths[place]))

    def slowest(self, world: int) -> float:
        """Expected pixels of a micro-batch on the rank that has the most. In every micro-step the others wait for it:
        ranks add up what they found in forward before they continue (engine/train/forward.py)."""
        random = np.random.default_rng(1)
        draws = max(8, min(400, 200_000 // world))
        return float(random.choice(self.pixels, (draws, world)).max(1).mean())


def _fixed_size(data: DataConfig) -> Size | None:
    """Of a classifier, or of a crop: VariedCrop's `size` is (height, width), mmdet's `crop_size` (width, height)."""
    if data.task == "classification":
        return Size(data.classification.image_size, data.classification.image_size)
    for step in data.augmentation:
        # Other crops are a share of the image or drawn from a range: they are counted as if nothing were cropped.
        if "Crop" not in str(step.get("type")) or step.get("crop_type", "absolute") != "absolute":
            continue
        if isinstance(step.get("size"), (list, tuple)):
            return Size.padded(*step["size"])
        if isinstance(step.get("crop_size"), (list, tuple)):
            return Size.padded(*reversed(step["crop_size"]))
    return None


def _resized(data: DataConfig, aspects: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Longer and shorter side fit into the scale, which is drawn between two where `train_scales` is given."""
    first, second = data.train_scales if data.train_scales is not None else (data.scale, data.scale)
    share = random.random(aspects.shape)
    long = max(first) + share * (max(second) - max(first))
    short = min(first) + share * (min(second) - min(first))
    ratio = np.maximum(aspects, 1 / aspects)
    short = np.minimum(short, long / ratio)
    long = short * ratio
    return np.where(aspects >= 1, short, long), np.where(aspects >= 1, long, short)


def _padded(side: np.ndarray) -> np.ndarray:
    return (np.ceil(np.round(side) / DIVISOR) * DIVISOR).astype(int)


def parse_size(text: str | None) -> Size | None:
    """1333x800 is 1333 wide and 800 high, padded as mmdet pads."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) >= 16 for part in parts):
        raise UserError(f"--image-size is WIDTHxHEIGHT in pixels, at least 16 each, such as 1333x800, got {text!r}")
    return Size.padded(int(parts[1]), int(parts[0]))
