"""What each task must define. Everything else is the same for all tasks.

A new task is one file with a subclass of `Task`, one line in `engine.tasks.registry`, and its name in
`DataConfig.task` (engine/config/schema.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import nn

from engine.config import RunConfig
from engine.data.types import Classes, Split

# The prediction for one image: numbers by name, and the image's number as `image_id`.
Prediction = dict[str, Any]
# Predicts on a data set and returns this rank's share of the predictions.
Predict = Callable[[Any], list[Prediction]]


class UsualData(NamedTuple):
    """The public data set that a task is usually trained on. Plans use it on machines without the data."""

    train: int
    val: int
    things: int
    stuff: int
    source: str


class Task(ABC):
    """The task of a run."""

    usual_data: ClassVar[UsualData]

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def check(self) -> None:
        """Refuse what can be seen to fail before the data is read. The default checks nothing."""
        return

    @abstractmethod
    def build_data(self) -> tuple[Split, Split, Classes]:
        """The training and the validation split, and their classes."""

    @abstractmethod
    def build_split(self, name: str, classes: Classes) -> Split:
        """One split for evaluation, for a model that knows `classes`."""

    @abstractmethod
    def read_classes(self) -> Classes:
        """The classes of the validation split, for weight files without class names."""

    @abstractmethod
    def build_model(self, classes: Classes) -> nn.Module:
        """The model, possibly under zero.Init, before `init_weights`."""

    @abstractmethod
    def build_preprocessor(self, classes: Classes) -> nn.Module:
        """The module that turns the loader's samples into a batch. It is built outside zero.Init."""

    @abstractmethod
    def as_numbers(self, output: Any, classes: Classes) -> Prediction:
        """Convert the model's output for one image to a small dictionary. Ranks gather these, so keep scores instead of
        full maps where possible."""

    def score_with_ranks(self, predictions: Sequence[Prediction] | None, split: Split, classes: Classes) -> Any:
        """What all ranks compute together for `write_scores`. All ranks call this; rank 0 has the predictions. The
        default computes nothing."""
        return None

    @abstractmethod
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
        """Write `eval.json` and the results to a folder, print a table if asked, and return the metrics. `scored` is
        what `score_with_ranks` returned."""

    @abstractmethod
    def draw_predictions(self, path: Path, predictions: Sequence[Prediction], split: Split, classes: Classes) -> None:
        """Draw `run.draw` predictions beside the ground truth."""

    @abstractmethod
    def infer(self, predict: Predict, classes: Classes, paths: Sequence[Path], out: Path, *, threshold: float) -> None:
        """Predict on images without annotations, and write the results of those that `predict` could read."""

    @abstractmethod
    def stand_ins(self, classes: Classes, *, micro: int, height: int, width: int, objects: int) -> list[Any]:
        """Made-up data samples of one micro-batch, always the same, for planning a step."""
