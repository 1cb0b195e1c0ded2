"""How a pipeline is trained with one optimizer: this package's rules combined, and the paper's two tables."""

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
    optimizer: str  # torch's name; with AGVM it is "AGVM" plus this name
    law: ScalingLaw
    length: Part
    warmup: Shape
    decay: Shape
    weight_decay: float
    clip_beyond: int | None = None  # clip gradients to norm 1 at batches beyond this one
    source: Source = "paper"  # source of weight decay and clipping
    params: Mapping[str, Any]
    interval: Interval = Interval()

    def settings(self, batch: int, *, agvm: bool) -> list[Setting]:
        kind = f"AGVM{self.optimizer}" if agvm else self.optimizer
        found = [
            Setting("optimizer.type", kind, "the recipe's name"),
            self.law.setting(batch),
            Setting("optimizer.params.weight_decay", self.weight_decay, "at every batch", self.source),
        ]
        # Momentum and the like, in torch's form: the paper's learning rates refer to it.
        found += [
            Setting(f"optimizer.params.{key}", value, "at every batch", "code") for key, value in self.params.items()
        ]
        if agvm:
            found += self.interval.settings(batch)
        for part in (self.length, self.warmup, self.decay):
            found += part.settings(batch)
        return [*found, self._clipping(batch)]

    def borrowed(self) -> Training:
        """The same numbers for a model that the paper's table and the authors' code do not cover."""
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


# The authors' configs of 16 epochs drop the learning rate at epochs 12 and 14.
_DECAY = MultiStep((0.75, 0.875), "code")
_SGD = ScalingLaw(name="SGD", lr=0.04)
_ADAMW = ScalingLaw(name="AdamW", lr=2e-4, doubling=1.5)


def coco_sgd(length: Part, *, law: ScalingLaw = _SGD) -> Training:
    """The paper's table of SGD: Faster R-CNN, Mask R-CNN and Panoptic FPN with a CNN."""
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
    """MegDet's rule for large batches: a linear warm-up, then SGD with a rate that grows linearly at every batch, and
    batch norm over all ranks (set by the backbones). All other numbers come from the SGD table."""
    law = ScalingLaw(name="MegDet", lr=lr, knee=None, start_source="ours", source="ours")
    warmup = WarmupEpochs(((1, 1), (129, 2)), shape="linear", source="ours", shape_source="ours")
    return replace(coco_sgd(length, law=law), warmup=warmup, source="ours")


def coco_adamw(length: Part, *, law: ScalingLaw = _ADAMW) -> Training:
    """The paper's table of AdamW: Faster R-CNN with a Transformer. The shapes are borrowed from the authors' code,
    which has SGD only."""
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
