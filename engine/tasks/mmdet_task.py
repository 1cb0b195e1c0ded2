"""Shared by the tasks whose model is an mmdet detector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from engine.data.augmentation import build_augmentation
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.modeling.detector import build_detector, build_preprocessor
from engine.modeling.fitting import check_parts
from engine.tasks.base import Task
from engine.tasks.stand_ins import mmdet_samples


class MmdetTask(Task):
    with_masks = False  # whether the loss needs masks of objects
    with_maps = False  # whether the loss needs a class for every pixel

    def check(self) -> None:
        build_augmentation(self.config.data)
        check_parts(self.config.detector)

    def build_model(self, classes: Classes) -> nn.Module:
        model = build_detector(self.config.detector, classes)
        check_task(model, self.config.detector.config, self.config.data.task)
        check_queries(model, self.config.data.scale)
        return model

    def build_preprocessor(self, classes: Classes) -> nn.Module:
        return build_preprocessor(self.config.detector, classes)

    def stand_ins(self, classes: Classes, *, micro: int, height: int, width: int, objects: int) -> list[Any]:
        return mmdet_samples(
            len(classes.things),
            micro=micro,
            height=height,
            width=width,
            objects=objects,
            masks=self.with_masks,
            maps=self.with_maps,
        )


def check_task(model: nn.Module, name: str, task: str) -> None:
    panoptic, semantic, with_masks = finds_segments(model), finds_classes_only(model), finds_masks(model)
    if (task == "panoptic") != panoptic:
        raise ConfigError(_panoptic_advice(model, name, task))
    if (task == "semantic") != semantic:
        raise ConfigError(
            f'data.task is "semantic" but detector "{name}" finds objects: use "semantic_fpn_r50" or the like'
            if task == "semantic"
            else f'detector "{name}" gives each pixel a class and finds no objects: set data.task to "semantic"'
        )
    if task == "detection" and with_masks:
        remove = 'or remove the head with detector.options {"roi_head.mask_head": null}'
        raise ConfigError(
            f'detector "{name}" finds masks: set data.task to "instance"'
            + (f", {remove}" if hasattr(model, "roi_head") else "")
        )
    if task == "instance" and not with_masks:
        raise ConfigError(f'data.task is "instance" but detector "{name}" has no mask head: use "detection"')


def check_queries(model: nn.Module, scale: Sequence[int]) -> None:
    """A two-stage DETR takes its queries from the positions of the feature maps: there must be enough of them, except
    for DDQ, which takes as many as differ."""
    queries, levels = getattr(model, "num_queries", 0), getattr(model, "num_feature_levels", None)
    if not (getattr(model, "as_two_stage", False) and isinstance(levels, int)) or hasattr(model, "dqs_cfg"):
        return
    positions = sum(math.prod(math.ceil(side / 2 ** (3 + level)) for side in scale) for level in range(levels))
    if queries > positions:
        raise ConfigError(
            f"the detector takes {queries} queries from {levels} feature maps, but images of {scale[0]}x{scale[1]} "
            f'have only {positions} positions there: set detector.options {{"num_queries": {positions // 3}}} or '
            "enlarge data.scale"
        )


def _panoptic_advice(model: nn.Module, name: str, task: str) -> str:
    if task == "panoptic":
        return f'data.task is "panoptic" but detector "{name}" has no panoptic head' + (
            ': set detector.options {"test_cfg.panoptic_on": true, "test_cfg.instance_on": false}'
            if _is_mask_former(model)
            else ""
        )
    return f'detector "{name}" has a panoptic head: set data.task to "panoptic"' + (
        ', or detector.options {"test_cfg.panoptic_on": false, "test_cfg.instance_on": true}'
        if _is_mask_former(model) and task == "instance"
        else ""
    )


def _is_mask_former(model: nn.Module) -> bool:
    """MaskFormer and Mask2Former find segments or objects, as their test_cfg says."""
    return hasattr(model, "panoptic_fusion_head") and not hasattr(model, "roi_head")


def finds_segments(model: nn.Module) -> bool:
    if _is_mask_former(model):
        return bool(model.test_cfg.get("panoptic_on", True))  # type: ignore[operator, union-attr]
    return hasattr(model, "panoptic_fusion_head")


def finds_classes_only(model: nn.Module) -> bool:
    return hasattr(model, "semantic_head") and not hasattr(model, "panoptic_fusion_head")


def finds_masks(model: nn.Module) -> bool:
    """Masks of objects: from a head of its own, or from the box head (RTMDet-Ins)."""
    return (
        bool(getattr(model, "with_mask", False))
        or hasattr(getattr(model, "bbox_head", None), "loss_mask")
        or (_is_mask_former(model) and not finds_segments(model))
    )
