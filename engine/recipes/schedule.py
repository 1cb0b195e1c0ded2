"""Length of a run, warm-up and decay, as functions of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from engine.recipes.setting import Setting, Source


class Part(Protocol):
    """A part of a schedule, counted in any unit."""

    def settings(self, batch: int) -> list[Setting]: ...


class Shape(Part, Protocol):
    """A warm-up or a decay. Models that the paper's tables and the authors' code do not cover may borrow it."""

    def borrowed(self) -> Shape:
        """The same numbers, with "ours" as their source."""
        ...


@dataclass(frozen=True)
class Epochs:
    """The same number of passes over the data at every batch size."""

    epochs: int
    source: Source = "paper"

    def settings(self, batch: int) -> list[Setting]:
        return [Setting("schedule.epochs", self.epochs, "the same at every batch", self.source)]


@dataclass(frozen=True)
class Images:
    """The same number of images at every batch size, counted in optimizer steps."""

    images: int
    source: Source = "paper"

    def settings(self, batch: int) -> list[Setting]:
        steps = max(1, round(self.images / batch))
        return [Setting("schedule.steps", steps, f"{self.images} images / {batch}", self.source)]


@dataclass(frozen=True)
class WarmupEpochs:
    """Epochs of warm-up by batch size: ((1, 1), (129, 2)) is one epoch, and two from batch 129 on.

    The paper prints rows at 32, 256, 512 and 1024. The batches at which the value changes in between are our choice.
    """

    from_batch: tuple[tuple[int, int], ...]
    shape: str = "exponential"
    source: Source = "paper"
    shape_source: Source = "code"

    def borrowed(self) -> WarmupEpochs:
        return replace(self, source="ours", shape_source="ours")

    def settings(self, batch: int) -> list[Setting]:
        epochs = [epochs for start, epochs in self.from_batch if batch >= start][-1]
        steps = ", ".join(
            [f"{self.from_batch[0][1]}", *(f"{n} from batch {start} on" for start, n in self.from_batch[1:])]
        )
        return [
            Setting("schedule.warmup_epochs", epochs, f"epochs: {steps}", self.source),
            Setting("schedule.warmup", self.shape, "from 0.001 of the learning rate", self.shape_source),
        ]


@dataclass(frozen=True)
class WarmupSteps:
    """Steps of warm-up. From a batch size on there are fewer, so that the number of warm-up images stays the same."""

    steps: int
    to_batch: int
    source: Source = "paper"

    def borrowed(self) -> WarmupSteps:
        return replace(self, source="ours")

    def settings(self, batch: int) -> list[Setting]:
        steps = max(1, round(self.steps * min(1.0, self.to_batch / batch)))
        rule = f"{self.steps} steps to batch {self.to_batch}, as many images beyond"
        return [
            Setting("schedule.warmup_steps", steps, rule, self.source),
            Setting("schedule.warmup", "linear", "from 0.001 of the learning rate", "ours"),
        ]


@dataclass(frozen=True)
class MultiStep:
    """The learning rate drops to a tenth at each of these fractions of the run."""

    milestones: tuple[float, ...]
    milestones_source: Source  # the paper says "MultiStep" and no more
    source: Source = "paper"

    def borrowed(self) -> MultiStep:
        return replace(self, source="ours", milestones_source="ours")

    def settings(self, batch: int) -> list[Setting]:
        shares = " and ".join(f"{m:g}" for m in self.milestones)
        return [
            Setting("schedule.decay", "multistep", "MultiStep", self.source),
            Setting(
                "schedule.milestones",
                list(self.milestones),
                f"a tenth from {shares} of the run on",
                self.milestones_source,
            ),
        ]


@dataclass(frozen=True)
class Poly:
    """(1 - step / steps)^power."""

    power: float
    source: Source = "paper"

    def borrowed(self) -> Poly:
        return replace(self, source="ours")

    def settings(self, batch: int) -> list[Setting]:
        return [
            Setting("schedule.decay", "poly", "(1 - step / steps)^power", self.source),
            Setting("schedule.power", self.power, "Poly's exponent", self.source),
        ]
