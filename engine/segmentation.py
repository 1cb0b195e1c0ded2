"""The tasks whose prediction is a map: a class for every pixel (semantic), or a segment (panoptic).

Each rank scores its own images against their truth, which the loader reads, and only numbers per class travel. Maps are
kept, compressed, of the images that are drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from engine import distributed
from engine.config import RunConfig
from engine.data.build import Split, build_data, read_content, split_files
from engine.data.coco import Classes, DataError, build_dataset, check_same_classes, read_classes, test_pipeline
from engine.data.panoptic_map import PanopticMap, encode_png, from_codes
from engine.data.plain import PlainImages
from engine.data.semantic import IGNORED, ClassMapImages, read_class_table
from engine.detector import build_detector, build_preprocessor
from engine.evaluation import gather_predictions
from engine.metrics import mean_iou, panoptic_quality
from engine.monitoring.pictures import draw_regions, read_image, save_image, side_by_side
from engine.monitoring.records import write_json

if TYPE_CHECKING:
    from engine.inference import Loaded


class _MapTask:
    """See `engine.task.Task`. What both kinds share."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def build_model(self, classes: Classes) -> nn.Module:
        return build_detector(self.config.detector, classes, self.config.data.task)

    def build_preprocessor(self, classes: Classes) -> nn.Module:
        return build_preprocessor(self.config.detector, classes)

    def as_numbers(self, output: Any, classes: Classes) -> dict[str, Any]:
        """`rows` for the score where the truth is known, and maps where there is none or where it is to be drawn."""
        found = self.read_output(output, classes)
        truth = output.get("truth")
        prediction: dict[str, Any] = dict(image_id=output.img_id)
        if truth is not None:
            prediction["rows"] = self.score_image(truth, found)
        if truth is None or output.shown:
            prediction.update(
                found=self.pack(found), truth=None if truth is None else self.pack(truth), path=output.img_path
            )
        return prediction

    def write_scores(
        self, folder: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes, *, table: bool
    ) -> dict[str, float]:
        metrics, by_class = self.score([prediction["rows"] for prediction in predictions], classes)
        write_json(folder / "results.classes.json", by_class, indent=2)
        write_json(folder / "eval.json", metrics, indent=2)
        if table:
            print(score_table(metrics, by_class), flush=True)
        return metrics

    def draw_predictions(
        self, path: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes
    ) -> None:
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

    def infer(self, loaded: Loaded, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Draw the map of every image, and write it as a PNG with the data set's own numbers.

        `threshold` is not for maps: which objects enter one is the detector's own `test_cfg`.
        """
        from engine.inference import drawn_paths, make_folder, predict_images

        task, classes = self.config.data.task, loaded.classes
        with distributed.together():
            drawn_to = drawn_paths(paths, out)
            mine = predict_images(loaded, PlainImages(paths, test_pipeline(self.config.data)))
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
            everything = gather_predictions(entries, len(paths))
            if everything is not None:
                categories = [
                    dict(id=category, name=name, isthing=int(label < len(classes.things)))
                    for label, (category, name) in enumerate(zip(classes.category_ids, classes.all))
                ]
                write_json(out / f"{task}.json", dict(annotations=everything, categories=categories))
                print(
                    f"maps of {len(paths)} images in {out / task}, what they show in {out / f'{task}.json'}; drawn images "
                    f"in {out}",
                    flush=True,
                )


class Panoptic(_MapTask):
    """Things and stuff of COCO-panoptic, scored by panoptic quality."""

    def build_data(self) -> tuple[Split, Split, Classes]:
        train, val, classes = build_data(self.config.data)
        val.dataset.shown = self.config.run.draw
        return train, val, classes

    def build_split(self, name: str, classes: Classes) -> Split:
        files = split_files(self.config.data)[name]
        content = read_content(files)
        check_same_classes(classes, read_classes(content, panoptic=True), files.annotations)
        dataset = build_dataset(self.config.data, files, classes, training=False, content=content)
        dataset.shown = self.config.run.draw
        return Split(dataset=dataset, content={}, files=files)

    def read_classes(self) -> Classes:
        return read_classes(read_content(split_files(self.config.data)["val"]), panoptic=True)

    def read_output(self, output: Any, classes: Classes) -> PanopticMap:
        from mmdet.structures import INSTANCE_OFFSET

        codes = output.pred_panoptic_seg.sem_seg[0].cpu().numpy()
        return from_codes(codes, void=len(classes.all), base=INSTANCE_OFFSET)

    def score_image(self, truth: PanopticMap, found: PanopticMap) -> dict[int, panoptic_quality.Row]:
        return panoptic_quality.image_quality(truth, found)

    def score(self, images: Sequence[dict[int, Any]], classes: Classes) -> tuple[dict[str, float], dict[str, Any]]:
        table = panoptic_quality.add_up(images, len(classes.all))
        return (
            panoptic_quality.quality_metrics(table, len(classes.things)),
            panoptic_quality.quality_by_class(table, classes.all),
        )

    def pack(self, found: PanopticMap) -> Any:
        return pack(found.pixels.astype(np.uint16)), found.labels, found.crowd

    def unpack(self, packed: Any) -> PanopticMap:
        pixels, labels, crowd = packed
        return PanopticMap(pixels=unpack(pixels, np.uint16).astype(np.int32), labels=labels, crowd=crowd)

    def regions(self, found: PanopticMap) -> tuple[np.ndarray, np.ndarray]:
        return found.pixels, found.labels

    def result(self, found: PanopticMap, classes: Classes) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The PNG and the segments in COCO's form: segment k has the colour k."""
        import cv2

        segments = []
        for number, label in enumerate(found.labels.tolist(), 1):
            mask = (found.pixels == number).astype(np.uint8)
            segments.append(
                dict(
                    id=number,
                    category_id=classes.category_ids[label],
                    category=classes.all[label],
                    area=int(mask.sum()),
                    bbox=list(cv2.boundingRect(mask)),
                )
            )
        return encode_png(found.pixels), segments


class Semantic(_MapTask):
    """A class for every pixel, in ADE20K's layout, scored by mean IoU."""

    def build_data(self) -> tuple[Split, Split, Classes]:
        files = split_files(self.config.data)
        classes = read_class_table(Path(files["train"].annotations))
        dataset = ClassMapImages(self.config.data, files["train"], classes, training=True)
        return Split(dataset=dataset, content={}, files=files["train"]), self.build_split("val", classes), classes

    def build_split(self, name: str, classes: Classes) -> Split:
        files = split_files(self.config.data)[name]
        own = read_class_table(Path(files.annotations))
        if own.things != classes.things:
            check_same_classes(classes, own, files.annotations)
            raise DataError(f"the classes of {files.annotations} are numbered otherwise than those of the model")
        dataset = ClassMapImages(self.config.data, files, classes, training=False)
        dataset.shown = self.config.run.draw
        return Split(dataset=dataset, content={}, files=files)

    def read_classes(self) -> Classes:
        return read_class_table(Path(split_files(self.config.data)["val"].annotations))

    def read_output(self, output: Any, classes: Classes) -> np.ndarray:
        return output.pred_sem_seg.sem_seg[0].cpu().numpy().astype(np.uint8)

    def score_image(self, truth: np.ndarray, found: np.ndarray) -> dict[int, mean_iou.Row]:
        return mean_iou.image_areas(truth, found, ignored=IGNORED)

    def score(self, images: Sequence[dict[int, Any]], classes: Classes) -> tuple[dict[str, float], dict[str, Any]]:
        table = mean_iou.add_up(images, len(classes.things))
        return mean_iou.iou_metrics(table), mean_iou.iou_by_class(table, classes.things)

    def pack(self, found: np.ndarray) -> Any:
        return pack(found)

    def unpack(self, packed: Any) -> np.ndarray:
        return unpack(packed, np.uint8)

    def regions(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(found == IGNORED, 0, found.astype(np.int32) + 1), np.arange(IGNORED)

    def result(self, found: np.ndarray, classes: Classes) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The PNG with the numbers of the classes, and how much each covers."""
        numbers = np.array(classes.category_ids, np.uint8)[found]
        segments = [
            dict(category_id=classes.category_ids[label], category=classes.things[label], area=int(area))
            for label, area in enumerate(np.bincount(found.ravel()))
            if area
        ]
        return numbers, segments


def pack(array: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    """Maps are large areas of one number: a hundredth of their size remains."""
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
    lines.append(f"{first} by class: " + ", ".join(cells[:12]) + (", ..." if len(cells) > 12 else ""))
    return "\n".join(lines) + "\n"
