"""Shared by the tasks whose prediction is a map: a class for every pixel (semantic), or a segment (panoptic).

Each rank scores its own images against the ground truth that its loader reads, so ranks send only numbers per class.
Compressed maps are kept for the images that are drawn.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine import distributed
from engine.data.coco import test_pipeline
from engine.data.plain import PlainImages
from engine.data.types import Classes, Split
from engine.errors import first_of
from engine.files import EVAL, make_folder, write_json
from engine.tasks.base import Predict, Prediction
from engine.tasks.mmdet_task import MmdetTask
from engine.tasks.pictures import draw_regions, drawn_paths, read_image, save_image, side_by_side
from engine.tasks.predicting import gather_sorted


class MapTask(MmdetTask):
    """Shared by both tasks. A "Map" is the prediction or the ground truth of one image, in memory."""

    with_maps = True

    @abstractmethod
    def read_output(self, output: Any, classes: Classes) -> Any:
        """The Map in the model's output."""

    @abstractmethod
    def score_image(self, truth: Any, found: Any) -> dict[int, Any]:
        """The contribution of one image to the score of each class."""

    @abstractmethod
    def score(self, images: Sequence[dict[int, Any]], classes: Classes) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics of all images, and those of each class."""

    @abstractmethod
    def pack(self, found: Any) -> Any:
        """A Map, compressed to be sent to rank 0."""

    @abstractmethod
    def unpack(self, packed: Any) -> Any: ...

    @abstractmethod
    def regions(self, found: Any) -> tuple[np.ndarray, np.ndarray]:
        """The Map as numbered regions (0: none) and the class of each, for drawing."""

    @abstractmethod
    def result(self, found: Any, classes: Classes) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The Map as a PNG, and the list of its segments or classes."""

    def as_numbers(self, output: Any, classes: Classes) -> Prediction:
        """`rows` for the score if the truth is known; maps if it is not known or if the image will be drawn."""
        found = self.read_output(output, classes)
        truth = output.get("truth")
        prediction: Prediction = dict(image_id=output.img_id)
        if truth is not None:
            prediction["rows"] = self.score_image(truth, found)
        if truth is None or output.shown:
            prediction.update(
                found=self.pack(found), truth=None if truth is None else self.pack(truth), path=output.img_path
            )
        return prediction

    def write_scores(
        self,
        folder: Path,
        predictions: Sequence[Prediction],
        split: Split,
        classes: Classes,
        *,
        table: bool,
        scored: Any = None,
    ) -> dict[str, float]:
        metrics, by_class = self.score([prediction["rows"] for prediction in predictions], classes)
        write_json(folder / "results.classes.json", by_class, indent=2)
        write_json(folder / EVAL, metrics, indent=2)
        if table:
            print(score_table(metrics, by_class), flush=True)
        return metrics

    def draw_predictions(self, path: Path, predictions: Sequence[Prediction], split: Split, classes: Classes) -> None:
        rows = [
            (
                self.draw(prediction["path"], prediction["truth"], classes),
                self.draw(prediction["path"], prediction["found"], classes),
            )
            for prediction in predictions
            if "found" in prediction
        ]
        if rows:
            side_by_side(rows, path)

    def draw(self, image: str | Path, packed: Any, classes: Classes) -> np.ndarray:
        regions, labels = self.regions(self.unpack(packed))
        return draw_regions(read_image(image), regions, labels, classes.all)

    def infer(self, predict: Predict, classes: Classes, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Draw the map of every image, and write it as a PNG with the data set's numbers.

        `threshold` is not used for maps: the detector's `test_cfg` decides which objects are in a map.
        """
        task = self.config.data.task
        with distributed.together():
            drawn_to = drawn_paths(paths, out)
            mine = predict(PlainImages(paths, test_pipeline(self.config.data)))
            make_folder(out / task)
            entries = []
            for prediction in mine:
                place = prediction["image_id"] - 1
                name = drawn_to[place].name
                picture, segments = self.result(self.unpack(prediction["found"]), classes)
                save_image(out / task / name, picture)
                save_image(drawn_to[place], self.draw(paths[place], prediction["found"], classes))
                entries.append(
                    dict(
                        image_id=prediction["image_id"], image=paths[place].name, file_name=name, segments_info=segments
                    )
                )
        with distributed.together():
            everything = gather_sorted(entries)
            if everything:
                categories = [
                    dict(id=category, name=name, isthing=int(label < len(classes.things)))
                    for label, (category, name) in enumerate(zip(classes.category_ids, classes.all))
                ]
                write_json(out / f"{task}.json", dict(annotations=everything, categories=categories))
                print(
                    f"maps of {len(everything)} images in {out / task}, what they show in {out / f'{task}.json'}; "
                    f"drawn images in {out}",
                    flush=True,
                )


def pack(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    """Compress a map. Maps consist of large areas of one number, so about 1 % of the size remains."""
    return array.shape, zlib.compress(np.ascontiguousarray(array).tobytes(), level=1)


def unpack(packed: tuple[tuple[int, ...], bytes], dtype: Any) -> np.ndarray:
    shape, data = packed
    return np.frombuffer(zlib.decompress(data), dtype).reshape(shape)


def score_table(metrics: dict[str, float], by_class: dict[str, dict[str, float]]) -> str:
    def number(value: float) -> str:
        return f"{value:.1f}" if value >= 0 else "-"

    names = list(metrics)
    lines = [""]
    for start in range(0, len(names), 3):  # PQ, SQ, RQ of all, things and stuff; or mIoU, mAcc, aAcc
        part = names[start : start + 3]
        lines += ["".join(f"{name:>9}" for name in part), "".join(f"{number(metrics[name]):>9}" for name in part)]
    first = names[0].removeprefix("m")
    cells = [f"{name} {number(values[first])}" for name, values in by_class.items()]
    lines.append(f"{first} by class: {first_of(cells, 12)}")
    return "\n".join(lines) + "\n"
