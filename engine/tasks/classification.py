"""Classification: one class for each image, scored by top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from engine import distributed
from engine.config.schema import SplitConfig
from engine.data.build import split_files
from engine.data.classification import LabelledImages, LabelledSample, Listing, image_transform, list_files, list_split
from engine.data.types import Classes, Split
from engine.errors import first_of
from engine.files import EVAL, make_folder, write_json
from engine.modeling.classifier import TOP, ImagePrediction, StackImages, build_classifier, timm_name
from engine.tasks.base import Predict, Prediction, Task, UsualData
from engine.tasks.pictures import titled_grid
from engine.tasks.predicting import gather_sorted


class Classification(Task):
    """A prediction has the `labels` and `scores` of the five best classes, its `truth` and its `loss`."""

    usual_data = UsualData(1_281_167, 50_000, 1000, 0, "ImageNet-1k")

    def build_data(self) -> tuple[Split, Split, Classes]:
        timm_name(self.config.detector.config)  # reports a typo before millions of files are listed
        files = split_files(self.config.data)
        listing, classes = list_split(files["train"], None)
        train = Split(dataset=self._images(listing, training=True), files=files["train"])
        return train, self._evaluated(files["val"], classes), classes

    def build_split(self, name: str, classes: Classes) -> Split:
        return self._evaluated(split_files(self.config.data)[name], classes)

    def _evaluated(self, files: SplitConfig, classes: Classes) -> Split:
        listing, _ = list_split(files, classes)
        return Split(dataset=self._images(listing, training=False), files=files)

    def _images(self, listing: Listing, *, training: bool) -> LabelledImages:
        name = timm_name(self.config.detector.config)
        return LabelledImages(listing, image_transform(self.config.data, name, training=training))

    def read_classes(self) -> Classes:
        return list_split(split_files(self.config.data)["val"], None)[1]

    def build_model(self, classes: Classes) -> nn.Module:
        return build_classifier(self.config.detector, classes, self.config.data.classification)

    def build_preprocessor(self, classes: Classes) -> nn.Module:
        return StackImages()

    def stand_ins(self, classes: Classes, *, micro: int, height: int, width: int, objects: int) -> list[Any]:
        return [LabelledSample(img_id=k + 1, label=k % len(classes.things)) for k in range(micro)]

    def as_numbers(self, output: ImagePrediction, classes: Classes) -> Prediction:
        return dict(
            image_id=output.img_id,
            truth=output.label,
            loss=output.loss,
            labels=output.labels.tolist(),
            scores=output.scores.tolist(),
        )

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
        write_json(folder / "results.json", result_entries(predictions, split.dataset.listing, classes))
        metrics = accuracy(predictions)
        write_json(folder / EVAL, metrics, indent=2)
        if table:
            print(accuracy_table(metrics, predictions, classes), flush=True)
        return metrics

    def draw_predictions(self, path: Path, predictions: Sequence[Prediction], split: Split, classes: Classes) -> None:
        # Spread over the data set, because it is sorted by class.
        places = np.linspace(0, len(predictions) - 1, min(self.config.run.draw, len(predictions))).round().astype(int)
        pictures = []
        for prediction in (predictions[place] for place in places):
            first, truth = prediction["labels"][0], prediction["truth"]
            title = f"{classes.things[first]} {prediction['scores'][0]:.2f}"
            if first != truth:
                title += f"\nnot {classes.things[truth]}"
            pictures.append((np.asarray(split.dataset.picture(prediction["image_id"] - 1)), title, first == truth))
        titled_grid(pictures, path)

    def infer(self, predict: Predict, classes: Classes, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Print the five best classes of every image with their probabilities, and write them to `results.json`."""
        listing = list_files(paths)
        with distributed.together():
            mine = predict(self._images(listing, training=False))
        with distributed.together():
            predictions = gather_sorted(mine)
            if predictions:
                make_folder(out)
                entries = result_entries(predictions, listing, classes)
                write_json(out / "results.json", entries)
                for entry in entries:
                    top = ", ".join(f"{found['category']} {found['score']:.3f}" for found in entry["top"])
                    print(f"{entry['file_name']}: {top}")
                print(f"classes of {len(predictions)} images in {out / 'results.json'}", flush=True)


def accuracy(predictions: Sequence[Prediction]) -> dict[str, float]:
    first = [prediction["labels"][0] == prediction["truth"] for prediction in predictions]
    among = [prediction["truth"] in prediction["labels"] for prediction in predictions]
    return {
        "accuracy_top1": float(np.mean(first)),
        f"accuracy_top{TOP}": float(np.mean(among)),
        "loss": float(np.mean([prediction["loss"] for prediction in predictions])),
    }


def accuracy_table(metrics: dict[str, float], predictions: Sequence[Prediction], classes: Classes) -> str:
    by_class: dict[int, list[bool]] = {}
    for prediction in predictions:
        by_class.setdefault(prediction["truth"], []).append(prediction["labels"][0] == prediction["truth"])
    cells = [f"{classes.things[label]} {np.mean(right):.3f}" for label, right in sorted(by_class.items())]
    lines = [
        "",
        "".join(f"{name:>16}" for name in metrics),
        "".join(f"{value:16.3f}" for value in metrics.values()),
        f"accuracy_top1 by class: {first_of(cells, 12)}",
    ]
    return "\n".join(lines) + "\n"


def result_entries(predictions: Sequence[Prediction], listing: Listing, classes: Classes) -> list[dict[str, Any]]:
    """What is known of each image, with class names; the truth if there is one."""
    entries = []
    for prediction in predictions:
        entry: dict[str, Any] = dict(
            image_id=prediction["image_id"], file_name=Path(listing.path(prediction["image_id"] - 1)).name
        )
        if prediction["truth"] is not None:
            entry["truth"] = classes.things[prediction["truth"]]
        entry["top"] = [
            dict(category=classes.things[label], score=score)
            for label, score in zip(prediction["labels"], prediction["scores"])
        ]
        entries.append(entry)
    return entries
