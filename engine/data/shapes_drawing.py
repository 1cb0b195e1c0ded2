"""Draw one scene of the `shapes` data set: textured shapes, partly hidden by each other, on a textured background.

With these pictures a small detector trains in minutes on a CPU, and every loader can be tested without a download.
A shape usually has the typical colour of its class, and any texture. The background classes differ in texture and
colour, as stuff does. A scene depends only on (seed, split, index) and the size options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

# Part of the cache folder's name: raise it when a picture or a file changes.
GENERATOR_VERSION = 2
MIN_VISIBLE_SHARE = 0.4
# Smaller parts, cut off by a shape in front, become void: no annotator outlines three pixels.
MIN_PART_PIXELS = 8


@dataclass(frozen=True)
class Category:
    """One class, with the id of the COCO files and the colour of the panoptic PNGs."""

    name: str
    id: int
    isthing: bool
    color: tuple[int, int, int]


# Ids have gaps, and those of stuff are above 91, as in COCO: code that uses an id as a label fails here too.
THINGS = (
    Category("disk", 1, True, (220, 20, 60)),
    Category("square", 3, True, (30, 60, 200)),
    Category("triangle", 4, True, (106, 200, 60)),
    Category("star", 18, True, (250, 170, 30)),
    Category("cross", 44, True, (175, 60, 175)),
    Category("crescent", 90, True, (40, 200, 210)),
)
STUFF = (
    Category("sand", 154, False, (208, 195, 150)),
    Category("brick", 171, False, (150, 100, 100)),
    Category("sky", 187, False, (70, 130, 180)),
    Category("grass", 193, False, (90, 160, 90)),
)


@dataclass(frozen=True, kw_only=True)
class Segment:
    category: Category
    iscrowd: bool


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An RGB image and its map of visible segments: 0 is void, `k` is `segments[k - 1]`."""

    image: np.ndarray
    labels: np.ndarray
    segments: tuple[Segment, ...]


def draw_scene(*, seed: int, split: int, index: int, image_size: int, max_objects: int) -> Scene:
    """Draw scene `index` of a split: background regions, a crowd in some, then shapes from back to front."""
    canvas = _Canvas(np.random.default_rng([seed, split, index]), image_size)
    # By index and not at random, so that every set of 24 images has each kind.
    empty, crowd_only, with_crowd = (index % 24 == k for k in (5, 11, 17))
    canvas.draw_background()
    if crowd_only or with_crowd:
        canvas.draw_crowd()
    if not (empty or crowd_only):
        for _ in range(canvas.rng.integers(1, max_objects + 1)):
            canvas.draw_object()
    canvas.void_small_parts()
    return Scene(image=_expose(canvas.rng, canvas.image), labels=canvas.labels, segments=tuple(canvas.segments))


class _Canvas:
    """A scene while it is drawn. `drawn` is the number of pixels of each thing before others were drawn over it."""

    def __init__(self, rng: np.random.Generator, image_size: int) -> None:
        self.rng, self.image_size = rng, image_size
        short = round(image_size * rng.uniform(0.7, 1.0))
        height, width = (image_size, short) if rng.random() < 0.5 else (short, image_size)
        self.extent = np.array([width, height])
        self.image = np.empty((height, width, 3), np.float32)
        self.labels = np.zeros((height, width), np.uint8)
        self.segments: list[Segment] = []
        self.drawn: dict[int, int] = {}

    def draw_background(self) -> None:
        """Two or three bands at a random angle with wavy borders, each of a stuff class, with thin void in between."""
        rng, size, (width, height) = self.rng, self.image_size, self.extent
        ys, xs = np.mgrid[:height, :width].astype(np.float32)
        along, across = _rotate(xs - width / 2, ys - height / 2, rng.uniform(0, 2 * np.pi))
        for waves in (1, 3):
            across = across + size * rng.uniform(0.01, 0.05) * np.sin(
                along * (2 * np.pi * waves / size) + rng.uniform(0, 6)
            )
        bands = rng.integers(2, 4)
        borders = (np.arange(1, bands) / bands - 0.5 + rng.uniform(-0.08, 0.08, bands - 1)) * min(height, width)
        band = np.searchsorted(borders, across)
        for number, kind in enumerate(rng.choice(len(STUFF), bands, replace=False)):
            here = band == number
            self.image[here] = _STUFF_TEXTURES[STUFF[kind].name](rng, xs, ys)[here]
            self.segments.append(Segment(category=STUFF[kind], iscrowd=False))
        self.labels[:] = band + 1
        self.labels[np.abs(across[..., None] - borders).min(-1) < 0.8] = 0

    def draw_crowd(self) -> None:
        """Many small shapes of one class under one label."""
        rng = self.rng
        category = THINGS[rng.integers(len(THINGS))]
        self.segments.append(Segment(category=category, iscrowd=True))
        label = len(self.segments)
        middle = rng.uniform(0.3, 0.7, 2) * self.extent
        for _ in range(rng.integers(12, 20)):
            size = self.image_size * rng.uniform(0.07, 0.12)
            centre = middle + rng.uniform(-0.22, 0.22, 2) * self.extent
            alpha = _coverage(_outline(rng, category.name, size, centre), self.labels.shape)
            _paint(rng, self.image, alpha, category)
            self.labels[alpha > 127] = label
        self.drawn[label] = int((self.labels == label).sum())

    def draw_object(self) -> None:
        """One shape at a place where it hides no other too much; no shape if a few tries find no such place."""
        rng = self.rng
        category = THINGS[rng.integers(len(THINGS))]
        size = self.image_size * np.exp(rng.uniform(np.log(0.11), np.log(0.5)))
        for _ in range(8):
            centre = rng.uniform(0.05, 0.95, 2) * self.extent
            if self.drawn and rng.random() < 0.25:
                # Near another shape, so that more shapes are partly hidden than by chance.
                rows, columns = np.nonzero(self.labels == rng.choice(list(self.drawn)))
                centre = np.array([columns.mean(), rows.mean()]) + rng.uniform(-0.6, 0.6, 2) * size
            points = _outline(rng, category.name, size, centre)
            alpha = _coverage(points, self.labels.shape)
            mask = alpha > 127
            pixels = int(mask.sum())
            left = np.bincount(self.labels[~mask], minlength=len(self.segments) + 1)
            # No thing may have too small a visible part: visible but not annotated, it would teach a detector that
            # shapes are background. The image border may cut off a fifth.
            if pixels >= 2 * MIN_VISIBLE_SHARE * cv2.contourArea(points.astype(np.float32)) and all(
                left[label] >= MIN_VISIBLE_SHARE * drawn for label, drawn in self.drawn.items()
            ):
                _paint(rng, self.image, alpha, category)
                self.segments.append(Segment(category=category, iscrowd=False))
                self.labels[mask] = len(self.segments)
                self.drawn[len(self.segments)] = pixels
                return

    def void_small_parts(self) -> None:
        for label in self.drawn:
            if self.segments[label - 1].iscrowd:
                continue
            mask = (self.labels == label).astype(np.uint8)
            count, parts, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
            for part in range(1, count):
                if stats[part, cv2.CC_STAT_AREA] < MIN_PART_PIXELS:
                    self.labels[parts == part] = 0


def _outline(rng: np.random.Generator, name: str, size: float, centre: np.ndarray) -> np.ndarray:
    """The corners of a shape in pixels, rotated by up to 20 degrees and slightly squeezed."""
    points = _OUTLINES[name] * (size / 2) * (1, rng.uniform(0.8, 1.0))
    return np.stack(_rotate(points[:, 0], points[:, 1], rng.uniform(-0.35, 0.35)), 1) + centre


def _coverage(points: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """How much of each pixel an outline covers, 0..255."""
    alpha = np.zeros(shape, np.uint8)
    # Whole coordinates are pixel centres in OpenCV and pixel corners in COCO. `shift` 4: in sixteenths of a pixel.
    return cv2.fillPoly(alpha, [np.round((points - 0.5) * 16).astype(np.int32)], 255, cv2.LINE_AA, shift=4)


def _paint(rng: np.random.Generator, image: np.ndarray, alpha: np.ndarray, category: Category) -> None:
    """Blend in a random texture, in shades of the class's colour (one in eight: of any) that differ from what is below.

    Classes have typical colours, as fruit or road signs do, so that the quickstart's detector learns them in minutes.
    """
    x, y, w, h = cv2.boundingRect(alpha)
    if w == 0:
        return
    patch, weight = image[y : y + h, x : x + w], alpha[y : y + h, x : x + w, None] / np.float32(255)
    beneath = (patch * weight).sum((0, 1)) / weight.sum()
    typical = np.array(category.color) if rng.random() < 0.875 else rng.uniform(0, 255, 3)
    colours = np.clip(typical + rng.normal(0, 30, (4, 3)), 0, 255)
    first = colours[np.abs(colours - beneath).sum(1).argmax()]
    second = 0.8 * first + 0.2 * rng.uniform(0, 255, 3)
    ys, xs = np.mgrid[:h, :w].astype(np.float32)
    mix = _PATTERNS[rng.integers(len(_PATTERNS))](rng, xs, ys)[..., None]
    patch += weight * (first + mix * (second - first) - patch)


def _expose(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Uneven light and sensor noise over everything, so that flat regions are not exactly flat."""
    ys, xs = np.mgrid[: image.shape[0], : image.shape[1]].astype(np.float32)
    light = 0.75 + 0.35 * _gradient(rng, xs, ys)
    return np.clip(image * light[..., None] + 5 * rng.standard_normal(image.shape, np.float32), 0, 255).astype(np.uint8)


def _rotate(x: np.ndarray, y: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    return x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)


# A pattern gives the mixing weight (0..1) of two colours for every pixel.
Pattern = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]


def _stripes(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    across, _ = _rotate(xs, ys, rng.uniform(0, np.pi))
    return np.clip(0.5 + 1.5 * np.sin(across * (2 * np.pi / rng.uniform(5, 12))), 0, 1)


def _checks(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    u, v = _rotate(xs, ys, rng.uniform(0, np.pi))
    cell = rng.uniform(4, 9)
    return (np.floor(u / cell) + np.floor(v / cell)) % 2


def _dots(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    cell = rng.uniform(6, 11)
    return np.clip(2.2 - 6 / cell * np.hypot(xs % cell - cell / 2, ys % cell - cell / 2), 0, 1)


def _gradient(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    across, _ = _rotate(xs, ys, rng.uniform(0, 2 * np.pi))
    return (across - across.min()) / max(float(np.ptp(across)), 1.0)


def _noise(
    rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray, grain_x: float = 3, grain_y: float = 3
) -> np.ndarray:
    height, width = xs.shape
    coarse = rng.random((int(height / grain_y) + 2, int(width / grain_x) + 2), dtype=np.float32)
    return np.clip(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), 0, 1)


def _bricks(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    row = np.floor((ys + rng.uniform(0, 8)) / 8)
    mortar = ((ys + 8 - row * 8) % 8 < 1.5) | ((xs + 8 * (row % 2)) % 16 < 1.5)
    return np.where(mortar, 1.0, 0.3 * _noise(rng, xs, ys))


_PATTERNS: tuple[Pattern, ...] = (_stripes, _checks, _dots, _gradient, _noise)


def _stuff(dark: tuple[int, int, int], bright: tuple[int, int, int], pattern: Pattern) -> Pattern:
    """A texture of two colours, which shift together from image to image."""

    def texture(rng: np.random.Generator, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
        shifted = (dark + rng.uniform(-22, 22, 3)).astype(np.float32)
        return shifted + pattern(rng, xs, ys)[..., None] * np.subtract(bright, dark, dtype=np.float32)

    return texture


_STUFF_TEXTURES: dict[str, Pattern] = {
    "sand": _stuff((185, 160, 105), (235, 215, 170), lambda rng, xs, ys: _noise(rng, xs, ys, 1, 1)),
    "brick": _stuff((140, 65, 50), (190, 180, 170), _bricks),
    "sky": _stuff((95, 150, 215), (225, 232, 240), lambda rng, xs, ys: _noise(rng, xs, ys, 40, 18)),
    "grass": _stuff((35, 85, 25), (115, 170, 75), lambda rng, xs, ys: _noise(rng, xs, ys, 1.5, 12)),
}


def _ring(radii: np.ndarray | float, turns: np.ndarray) -> np.ndarray:
    return np.stack([radii * np.cos(2 * np.pi * turns), radii * np.sin(2 * np.pi * turns)], 1)


def _crescent() -> np.ndarray:
    # The inner arc is part of a circle of radius 0.8 about (0.5, 0); both circles meet at x = 0.61.
    horn = np.arccos(0.61)
    outer = _ring(1.0, np.linspace(horn, 2 * np.pi - horn, 40) / (2 * np.pi))
    inner_horn = np.arctan2(np.sin(horn), 0.61 - 0.5)
    inner = _ring(0.8, np.linspace(2 * np.pi - inner_horn, inner_horn, 30) / (2 * np.pi)) + (0.5, 0)
    return np.concatenate([outer, inner[1:-1]]) + (0.2, 0)


# Outlines, about within the unit circle. None has a hole, because COCO's polygons cannot describe one.
_OUTLINES: dict[str, np.ndarray] = {
    "disk": _ring(1.0, np.arange(48) / 48),
    "square": _ring(1.1, np.arange(4) / 4 + 1 / 8),
    "triangle": _ring(1.15, np.arange(3) / 3),
    "star": _ring(np.tile([1.15, 0.46], 5), np.arange(10) / 10),
    "cross": np.array(
        [(1, 0.35), (0.35, 0.35), (0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35)]
        + [(-1, -0.35), (-0.35, -0.35), (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35)]
    ),
    "crescent": _crescent(),
}
