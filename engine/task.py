"""What detectors, segmenters and classifiers do differently: data, model, scores, pictures. All else is one loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from engine.config import RunConfig
from engine.data.build import Split
from engine.data.coco import Classes

if TYPE_CHECKING:
    from engine.inference import Loaded


class Task(Protocol):
    """The task of a run. Predictions are dictionaries, one for each image, with its number under `image_id`."""

    config: RunConfig

    def build_data(self) -> tuple[Split, Split, Classes]:
        """Training and validation."""

    def build_split(self, name: str, classes: Classes) -> Split:
        """One split as it is evaluated, for a model that knows `classes`."""

    def read_classes(self) -> Classes:
        """The classes of the validation split, for weights that do not name theirs."""

    def build_model(self, classes: Classes) -> nn.Module:
        """The model, possibly under zero.Init, before `init_weights`."""

    def build_preprocessor(self, classes: Classes) -> nn.Module:
        """What makes a batch of the loader's samples, built outside zero.Init."""

    def as_numbers(self, output: Any, classes: Classes) -> dict[str, Any]:
        """The model's output for one image as a prediction: what ranks gather, so not a map where a score does."""

    def write_scores(
        self, folder: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes, *, table: bool
    ) -> dict[str, float]:
        """`eval.json` and results in a folder, and a table on the screen."""

    def draw_predictions(
        self, path: Path, predictions: Sequence[dict[str, Any]], split: Split, classes: Classes
    ) -> None:
        """A picture of `run.draw` predictions beside the truth."""

    def infer(self, loaded: Loaded, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Predict on images of which nothing is known and write what was found."""


def task_of(config: RunConfig) -> Task:
    if config.data.task == "classification":
        from engine.classification import Classification

        return Classification(config)
    if config.data.task in ("panoptic", "semantic"):
        from engine.segmentation import Panoptic, Semantic

        return Panoptic(config) if config.data.task == "panoptic" else Semantic(config)
    from engine.detection import Detection

    return Detection(config)
