"""The pipelines of the paper: model, task, files of the data set, and how each optimizer trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.recipes.agvm import Interval
from engine.recipes.learning_rate import ScalingLaw
from engine.recipes.schedule import Epochs, Images, MultiStep, Poly, WarmupEpochs, WarmupSteps
from engine.recipes.setting import Setting, Source
from engine.recipes.training import Training, coco_adamw, coco_megdet, coco_sgd

Files = Mapping[str, Mapping[str, str]]


def _coco(kind: str) -> Files:
    """The files of COCO 2017 (train and val), relative to its root, with the names of the download."""
    return {
        split: {"annotations": f"annotations/{kind}_{split}2017.json", "images": f"{split}2017"}
        for split in ("train", "val")
    }


_INSTANCES = _coco("instances")
_PANOPTIC = {
    split: {**files, "panoptic": f"annotations/panoptic_{split}2017"} for split, files in _coco("panoptic").items()
}
_ADE20K = {
    split: {"annotations": f"annotations/{folder}", "images": f"images/{folder}"}
    for split, folder in (("train", "training"), ("val", "validation"))
}


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    config: str  # detector.config; with a ResNet-50 if other backbones are possible
    task: str
    dataset: str = "coco"  # the layout of its files
    files: Files
    training: Mapping[str, Training]  # by the optimizer's name in a recipe
    backbones: tuple[str, ...] = ("r18", "r50", "swin_t")  # empty if the model has its own
    only_swin: tuple[str, ...] = ()  # optimizers that are used with Swin only
    batch_norm: bool = False  # whether there is batch norm outside the backbone
    longer_source: Source = "ours"  # source of a backbone's extra epochs
    weights: str | None = None  # used instead of a backbone's
    further: tuple[Setting, ...] = ()

    def settings(self) -> list[Setting]:
        return [
            Setting("detector.config", self.config, "the recipe's pipeline"),
            Setting("data.task", self.task, "the recipe's pipeline"),
            Setting("data.dataset", self.dataset, "the recipe's pipeline"),
            *self.further,
        ]


# The paper trains only Faster R-CNN with AdamW.
_BORROWED_ADAMW = coco_adamw(Epochs(12, "ours")).borrowed()

_HALF = "half of the two-stage rate as in mmdet"
_RETINANET_SGD = ScalingLaw(name=f"SGD, {_HALF}", lr=0.02)
_RETINANET_ADAMW = ScalingLaw(name=f"AdamW, {_HALF}", lr=1e-4, doubling=1.5)

_SEMANTIC_SGD = Training(
    optimizer="SGD",
    law=ScalingLaw(name="SGD, semantic", lr=0.01, knee=256),
    length=Images(5_120_000),
    warmup=WarmupSteps(500, to_batch=512),
    decay=Poly(0.9),
    weight_decay=5e-4,
    params={"momentum": 0.9},
    interval=Interval(usual=5),
)
# The paper trains it on ResNet-50 with SGD only. We combine AdamW's law, weight decay and clipping with the length,
# warm-up, decay and interval of that run.
_SEMANTIC_ADAMW = replace(
    coco_adamw(Images(5_120_000, "ours")).borrowed(),
    warmup=WarmupSteps(500, to_batch=512, source="ours"),
    decay=Poly(0.9, "ours"),
    interval=Interval(usual=5, source="ours"),
)

# The paper gives batch 960, 11 epochs and the learning rate 1.5e-4, which follows from no rule: our law starts there.
# It fine-tunes a detector pre-trained on Objects365, so the warm-up is short. It has as few steps as the runs at batch
# 1024, so it uses their interval.
_UNINET_ADAMW = replace(
    coco_adamw(Epochs(11)).borrowed(),
    law=ScalingLaw(name="AdamW", lr=1.5e-4, batch=960, doubling=1.5, source="ours"),
    warmup=WarmupEpochs(((1, 1),), shape="linear", source="ours", shape_source="ours"),
    decay=MultiStep((0.75, 0.917), "ours", "ours"),
    interval=Interval(usual=5, source="ours"),
)

PIPELINES = {
    "retinanet": Pipeline(
        config="mmdet::retinanet/retinanet_r50_fpn_1x_coco.py",
        task="detection",
        files=_INSTANCES,
        training={
            "sgd": coco_sgd(Epochs(24, "ours"), law=_RETINANET_SGD).borrowed(),
            "adamw": coco_adamw(Epochs(24), law=_RETINANET_ADAMW).borrowed(),
            "megdet": coco_megdet(Epochs(24, "ours"), lr=_RETINANET_SGD.lr),
        },
    ),
    "faster_rcnn": Pipeline(
        config="mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
        task="detection",
        files=_INSTANCES,
        training={"sgd": coco_sgd(Epochs(16)), "adamw": coco_adamw(Epochs(12)), "megdet": coco_megdet(Epochs(16))},
        longer_source="paper",
    ),
    "mask_rcnn": Pipeline(
        config="mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
        task="instance",
        files=_INSTANCES,
        training={"sgd": coco_sgd(Epochs(14)), "adamw": _BORROWED_ADAMW, "megdet": coco_megdet(Epochs(14))},
    ),
    "panoptic_fpn": Pipeline(
        config="mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py",
        task="panoptic",
        files=_PANOPTIC,
        training={"sgd": coco_sgd(Epochs(14)), "adamw": _BORROWED_ADAMW, "megdet": coco_megdet(Epochs(14))},
    ),
    "semantic_fpn": Pipeline(
        config="semantic_fpn_r50",
        task="semantic",
        dataset="ade20k",
        files=_ADE20K,
        training={"sgd": _SEMANTIC_SGD, "adamw": _SEMANTIC_ADAMW},
        only_swin=("adamw",),
        batch_norm=True,
        further=(
            Setting("data.scale", [2048, 512], "as mmseg trains it", "ours"),
            Setting("data.train_scales", [[1024, 256], [4096, 1024]], "as mmseg trains it", "ours"),
            Setting(
                "data.augmentation",
                [{"type": "VariedCrop", "size": [512, 512]}, {"type": "PhotoMetricDistortion"}],
                "as mmseg trains it",
                "ours",
            ),
        ),
    ),
    "uninet_g_htcx": Pipeline(
        config="uninet_g_htcx",
        task="instance",
        files=_INSTANCES,
        backbones=(),
        weights="weights/uninet_g_htcx_o365.pth",
        training={"adamw": _UNINET_ADAMW},
        further=(
            Setting("data.scale", [1600, 1200], "longer side at most 1600"),
            Setting("data.train_scales", [[1600, 400], [1600, 1200]], "shorter side drawn from 400 to 1200"),
            Setting("detector.drop_mismatched", True, "the mask branch is new after Objects365", "ours"),
            Setting("detector.sync_bn", True, "batch-norm statistics over all ranks", "ours"),
            Setting("detector.checkpoint_activations", ["backbone"], "1.1 billion parameters", "ours"),
            Setting("optimizer.paramwise.norm_decay", False, "at every batch", "ours"),
            Setting("optimizer.paramwise.bias_decay", False, "at every batch", "ours"),
        ),
    ),
}
