"""A recipe: one pipeline with one backbone and one optimizer, with or without AGVM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.recipes.backbones import BACKBONES, Backbone
from engine.recipes.pipelines import PIPELINES, Pipeline
from engine.recipes.setting import Setting
from engine.recipes.training import Training

# Weights are the same at every stage. At stage 0 DeepSpeed reduces gradients after backward; at stages 1 and 2 during
# it, one bucket after another. Its default bucket holds a whole ResNet-50 detector: nothing would be left to overlap.
_ZERO = [
    Setting("zero_optimization.stage", 1, "the optimizer's state divided over the ranks", "ours"),
    Setting("zero_optimization.overlap_comm", True, "gradients are reduced during backward", "ours"),
    Setting("zero_optimization.reduce_bucket_size", 10_000_000, "40 MB in fp32: several for a detector", "ours"),
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    pipeline: Pipeline
    backbone: Backbone | None  # None: the pipeline's own
    training: Training
    agvm: bool

    def settings(self, batch: int) -> list[Setting]:
        """Every value of a run at this batch size, in the order in which they are printed."""
        backbone = self.backbone.settings() if self.backbone else []
        if self.pipeline.batch_norm and not (self.backbone and self.backbone.batch_norm):
            backbone.append(
                Setting("detector.sync_bn", True, "batch-norm statistics of the head over all ranks", "ours")
            )
        training = map(self._longer, self.training.settings(batch, agvm=self.agvm))
        return [*self.pipeline.settings(), *backbone, *training, *(_ZERO if self.backbone else ())]

    def _longer(self, setting: Setting) -> Setting:
        extra = self.backbone.extra_epochs if self.backbone else 0
        if setting.key != "schedule.epochs" or not extra:
            return setting
        source = self.pipeline.longer_source if setting.source == "paper" else setting.source
        return setting._replace(
            value=setting.value + extra, rule=f"{setting.value}, and {extra} more with this backbone", source=source
        )

    def files(self) -> dict[str, Any]:
        """Default paths of the data and the initial weights. They follow from no rule."""
        weights = self.backbone.weights if self.backbone else self.pipeline.weights
        return {
            "data.train": self.pipeline.files["train"],
            "data.val": self.pipeline.files["val"],
            "detector.load_from": weights,
        }


@cache
def _recipes() -> dict[str, Recipe]:
    found = {}
    for pipeline_name, pipeline in PIPELINES.items():
        for backbone_name in pipeline.backbones or (None,):
            backbone = BACKBONES[backbone_name] if backbone_name else None
            for optimizer, training in pipeline.training.items():
                if backbone_name == "swin_t" and optimizer != "adamw":
                    continue  # Swin is trained with AdamW, also in the paper; MegDet is about batch norm
                if backbone_name != "swin_t" and optimizer in pipeline.only_swin:
                    continue
                if backbone and backbone.table != optimizer:
                    training = training.borrowed()
                for agvm in (True, False) if optimizer != "megdet" else (False,):
                    name = "_".join(filter(None, (pipeline_name, backbone_name, "agvm" if agvm else None, optimizer)))
                    found[name] = Recipe(name=name, pipeline=pipeline, backbone=backbone, training=training, agvm=agvm)
    return found


def recipe_names() -> list[str]:
    return list(_recipes())


def find_recipe(name: str) -> Recipe:
    """Raises KeyError for a name that is not in `recipe_names`."""
    return _recipes()[name]
