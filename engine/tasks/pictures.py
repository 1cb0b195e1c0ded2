"""Draw predictions: boxes, masks and regions on images, alone or beside the ground truth, and classes as titles."""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from engine.errors import ConfigError, DataError


def _colour(label: int) -> tuple[int, int, int]:
    """The colour of a class: golden-ratio steps around the hue circle give distinct colours."""
    red, green, blue = colorsys.hsv_to_rgb((label * 0.618034) % 1, 0.85, 1.0)
    return int(red * 255), int(green * 255), int(blue * 255)


def _enlarged(image: np.ndarray) -> tuple[np.ndarray, int]:
    """A copy and its scale. Small images are enlarged, so that a label fits beside an object of twenty pixels."""
    scale = max(1, round(480 / max(image.shape[:2])))
    if scale == 1:
        return image.copy(), 1
    return cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC), scale


def draw_regions(image: np.ndarray, regions: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """A copy of an RGB image with a map drawn over it: 0 is no region, k is a region of class `labels[k - 1]`."""
    canvas, scale = _enlarged(image)
    large = cv2.resize(regions.astype(np.int32), canvas.shape[1::-1], interpolation=cv2.INTER_NEAREST)
    shown = [int(region) for region in np.unique(large) if region > 0]
    for region in shown:
        mask = large == region
        canvas[mask] = (0.4 * canvas[mask] + 0.6 * np.array(_colour(int(labels[region - 1])))).astype(np.uint8)
    edge = np.zeros(large.shape, bool)
    edge[:, 1:] |= large[:, 1:] != large[:, :-1]
    edge[1:] |= large[1:] != large[:-1]
    canvas[edge] = 255
    for region in shown:
        inside = cv2.distanceTransform(np.pad((large == region).astype(np.uint8), 1), cv2.DIST_L2, 3)
        _, depth, _, (x, y) = cv2.minMaxLoc(inside)
        text = names[labels[region - 1]]
        (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.42, 1)
        if depth > height:  # the name is put where the region is widest, if it stays visible around the name
            at = (int(np.clip(x - width // 2, 0, max(canvas.shape[1] - width, 0))), int(y + height // 2))
            cv2.putText(canvas, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 3, cv2.LINE_AA)
            cv2.putText(canvas, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.42, (255, 255, 255), 1, cv2.LINE_AA)
    return canvas


def draw_objects(image: np.ndarray, objects: Sequence[dict[str, Any]], names: Sequence[str]) -> np.ndarray:
    """A copy of an RGB image with `objects`: `bbox` (xyxy), `label`, optional `score` and `mask`."""
    canvas, scale = _enlarged(image)
    for item in objects:
        mask = item.get("mask")
        if mask is not None:
            mask = cv2.resize(mask.astype(np.uint8), canvas.shape[1::-1], interpolation=cv2.INTER_NEAREST).astype(bool)
            canvas[mask] = (0.55 * canvas[mask] + 0.45 * np.array(_colour(item["label"]))).astype(np.uint8)
    for item in objects:
        colour = _colour(item["label"])
        x1, y1, x2, y2 = (int(round(v * scale)) for v in item["bbox"])
        cv2.rectangle(canvas, (x1, y1), (x2, y2), colour, 2)
        text = names[item["label"]] + (f" {item['score']:.2f}" if "score" in item else "")
        (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.42, 1)
        x1 = min(x1, canvas.shape[1] - width)
        top = max(y1 - height - 4, 0)
        cv2.rectangle(canvas, (x1, top), (x1 + width, top + height + 4), colour, -1)
        cv2.putText(canvas, text, (x1, top + height + 1), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
    return canvas


def read_image(path: str | Path) -> np.ndarray:
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    if image is None:
        raise DataError(f"image {path} does not exist or is not a picture")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def save_image(path: Path, image: np.ndarray) -> None:
    """Save an RGB picture, or a map with one number for each pixel."""
    image = cv2.cvtColor(image, cv2.COLOR_RGB2BGR) if image.ndim == 3 else image
    if not cv2.imwrite(str(path), image):  # on failure it returns False without a message
        raise DataError(f"picture {path} cannot be written")


def side_by_side(rows: Sequence[tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """Save pairs of pictures: the ground truth on the left, the prediction on the right, two pairs per line."""
    from matplotlib.figure import Figure  # here: only reports draw

    lines = (len(rows) + 1) // 2
    figure = Figure(figsize=(13, 3.3 * lines), layout="constrained")
    axes = np.atleast_2d(figure.subplots(lines, 4))
    for axis in axes.flat:
        axis.set_axis_off()
    for index, pair in enumerate(rows):
        for side, (image, title) in enumerate(zip(pair, ("ground truth", "prediction"))):
            axis = axes[index // 2, 2 * (index % 2) + side]
            axis.imshow(image)
            axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=100)
    return path


def titled_grid(pictures: Sequence[tuple[np.ndarray, str, bool]], path: Path, *, columns: int = 6) -> Path:
    """Save a sheet of images with titles, green for correct ones and red for wrong ones."""
    from matplotlib.figure import Figure  # here: only reports draw

    lines = (len(pictures) + columns - 1) // columns
    figure = Figure(figsize=(2 * columns, 2.4 * lines), layout="constrained")
    axes = np.atleast_1d(figure.subplots(lines, columns)).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (image, title, right) in zip(axes, pictures):
        axis.imshow(image)
        axis.set_title(title, fontsize=8, color="tab:green" if right else "tab:red")
    figure.savefig(path, dpi=100)
    return path


def drawn_paths(paths: Sequence[Path], out: Path) -> list[Path]:
    """Output paths of the drawn images: the image's own name, with a number before it if two images share a name."""
    stems = Counter(path.stem for path in paths)
    drawn = [
        out / f"{path.stem if stems[path.stem] == 1 else f'{number:04d}-{path.stem}'}.png"
        for number, path in enumerate(paths, 1)
    ]
    sources = {path.resolve() for path in paths}
    for path in drawn:
        if path.resolve() in sources:
            raise ConfigError(f"--out {out} would write over the image {path.name}: choose another folder")
    return drawn
