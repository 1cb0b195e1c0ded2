"""Whether the images that an annotation file lists are there, can be read, and have the sizes that it says.

A run looks at a sample before it starts; `launch/data.py check` looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from engine.config.schema import SplitConfig
from engine.errors import DataError

SAMPLE = 100  # images that a run looks at
MAP_SAMPLE = 20  # maps of pixels that a run looks at: they are read whole
_THREADS = 8  # a shared file system answers several questions at once
_BLOCK = 1000
_ORIENTATION = 0x0112  # EXIF's tag; 5 to 8 are quarter turns


def image_size(path: str | PathLike[str]) -> tuple[int, int]:
    """Width and height as the loaders see the image, with its EXIF orientation; OSError if it is no image."""
    try:
        with Image.open(path) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except FileNotFoundError:
        raise
    except Exception:  # Pillow raises errors of many types, and there are formats that only OpenCV reads
        pixels = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if pixels is None:
            raise OSError(f"{path} is not an image") from None
        return pixels.shape[1], pixels.shape[0]
    return (height, width) if turned else (width, height)


def known_size(path: str) -> tuple[int, int]:
    """Width and height; DataError with the image's name if it cannot be read."""
    try:
        return image_size(path)
    except FileNotFoundError:
        raise DataError(f"image {path} does not exist") from None
    except OSError as error:
        raise DataError(_unreadable(path, error)) from None


def _unreadable(path: str | PathLike[str], error: OSError) -> str:
    return f"image {path} cannot be read ({error.strerror or 'it is not an image'})"


def image_fault(image: dict[str, Any], files: SplitConfig) -> str | None:
    """What is wrong with an image of an annotation file, in one sentence."""
    path = Path(files.images) / image["file_name"]
    try:
        width, height = image_size(path)
    except FileNotFoundError:
        return f"image {path} does not exist, though {files.annotations} lists it"
    except OSError as error:
        return _unreadable(path, error)
    if (width, height) != (image["width"], image["height"]):
        return (
            f"image {path} has {width} x {height} pixels, but {files.annotations} says "
            f"{image['width']} x {image['height']}"
        )
    return None


def sample_of(count: int, most: int = SAMPLE) -> Sequence[int]:
    """At most `most` places, from the first to the last, evenly spread and always the same."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


def check_sample(image_at: Callable[[int], dict[str, Any]], count: int, files: SplitConfig) -> None:
    """Refuse a split whose images are missing or of other sizes, as far as a sample shows."""
    images = [image_at(place) for place in sample_of(count)]
    for fault in faults_of(images, lambda image: image_fault(image, files)):
        if fault is not None:
            raise DataError(f"{fault}; python launch/data.py check finds all such images")


def faults_of(items: Sequence[Any], fault: Callable[[Any], str | None]) -> Iterator[str | None]:
    """The fault of each item, in order, looked for by several threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(items), _BLOCK):  # each one that waits takes memory, and there may be millions
            yield from pool.map(fault, items[start : start + _BLOCK])
