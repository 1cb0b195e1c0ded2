"""Run a loaded model on images without annotations."""

from __future__ import annotations

import glob
from functools import partial
from pathlib import Path

from engine import distributed
from engine.data.classification import IMAGE_SUFFIXES
from engine.errors import DataError
from engine.inference.load import Loaded, predict_images
from engine.tasks.detection import SCORE_SHOWN


def find_images(source: str) -> list[Path]:
    """The image, the images of a folder (not of its subfolders) or of a glob, sorted by name."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = [p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]
    elif path.is_file():
        found = [path]
    else:
        found = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise DataError(
            f"{source} is no image, no folder with images and no pattern that finds one ({', '.join(IMAGE_SUFFIXES)})"
        )
    return sorted(found)


def infer(loaded: Loaded, source: str, out: Path, *, threshold: float = SCORE_SHOWN) -> list[str]:
    """Run the model on images and write the results to `out`. Returns why images were left out, on every rank."""
    with distributed.together():
        paths = find_images(source)
    mine: list[str] = []
    predict = partial(predict_images, loaded, unreadable=mine)
    loaded.task.infer(predict, loaded.classes, paths, out, threshold=threshold)
    reasons = [reason for share in distributed.all_gather_objects(mine) for reason in share]
    if len(reasons) == len(paths):
        more = f"; nor can the other {len(paths) - 1}" if len(paths) > 1 else ""
        raise DataError(reasons[0] + more)
    return reasons
