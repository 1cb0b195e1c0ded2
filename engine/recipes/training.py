"""How a pipeline is trained with one optimizer: the rules of this package put together, and the paper's two sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.recipes.agvm import Interval
from engine.recipes.learning_rate import ScalingLaw
from engine.recipes.schedule import MultiStep, Part, Shape, WarmupEpochs
from engine.recipes.setting import Setting, Source


@dataclass(frozen=True, kw_only=True)
class Training:
    optimizer: str  # of torch; AGVM's has the same name behind "AGVM"
    law: ScalingLaw
    length: Part
    warmup: Shape
    decay: Shape
    weight_decay: float
    clip_beyond: int | None = None  # clip gradients to norm 1 at batches beyond this one
    source: Source = "paper"  # of weight decay and clipping
    params: Mapping[str, Any]
    interval: Interval = Interval()

    def settings(self, batch: int, *, agvm: bool) -> list[Setting]:
        kind = f"AGVM{self.optimizer}" if agvm else self.optimizer
        found = [
            Setting("optimizer.type", kind, "the recipe's name"),
            self.law.setting(batch),
            Setting("optimizer.params.weight_decay", self.weight_decay, "at every batch", self.source),
        ]
        # Momentum and the like: torch's form, to which the paper's learning rates belong.
        found += [
            Setting(f"optimizer.params.{key}", value, "at every batch", "code") for key, value in self.params.items()
        ]
        if agvm:
            found += self.interval.settings(batch)
        for part in (self.length, self.warmup, self.decay):
            found += part.settings(batch)
        return [*found, self._clipping(batch)]

    def borrowed(self) -> Training:
        """The same numbers where the paper's table, and the authors' code, are of other models."""
        return replace(
            self,
            source="ours",
            law=replace(self.law, start_source="ours", source="ours"),
            warmup=self.warmup.borrowed(),
            decay=self.decay.borrowed(),
        )

    def _clipping(self, batch: int) -> Setting:
        if self.clip_beyond is None:
            return Setting("gradient_clipping", 0.0, "none", self.source)
        value = 1.0 if batch > self.clip_beyond else 0.0
        return Setting("gradient_clipping", value, f"1.0 beyond batch {self.clip_beyond}, none up to it", self.source)


# Where the authors' configs of 16 epochs drop the learning rate: epochs 12 and 14.
_DECAY = MultiStep((0.75, 0.875), "code")


def coco_sgd(length: Part, *, law: ScalingLaw = ScalingLaw(name="SGD", lr=0.04)) -> Training:
    """The table of SGD on Faster R-CNN, Mask R-CNN and Panoptic FPN with a CNN."""
    return Training(
        optimizer="SGD",
        law=law,
        length=length,
        warmup=WarmupEpochs(((1, 1), (129, 2))),
        decay=_DECAY,
        weight_decay=1e-4,
        params={"momentum": 0.9},
    )


def coco_megdet(length: Part, *, lr: float = 0.04) -> Training:
    """MegDet's way to large batches: SGD at a rate that grows linearly without end, behind a linear warm-up, and batch norm
    over all ranks, which its backbones bring. Numbers that belong to no rule of its own are those of the SGD table."""
    law = ScalingLaw(name="MegDet", lr=lr, knee=None, start_source="ours", source="ours")
    warmup = WarmupEpochs(((1, 1), (129, 2)), shape="linear", source="ours", shape_source="ours")
    return replace(coco_sgd(length, law=law), warmup=warmup, source="ours")


def coco_adamw(length: Part, *, law: ScalingLaw = ScalingLaw(name="AdamW", lr=2e-4, doubling=1.5)) -> Training:
    """The table of AdamW on Faster R-CNN with a Transformer. The authors' code has SGD only, so its shapes are borrowed."""
    warmup = WarmupEpochs(((1, 1), (129, 2), (1024, 3)), shape_source="ours")
    return Training(
        optimizer="AdamW",
        law=law,
        length=length,
        warmup=warmup,
        decay=replace(_DECAY, milestones_source="ours"),
        weight_decay=0.05,
        clip_beyond=128,
        params={},
    )
