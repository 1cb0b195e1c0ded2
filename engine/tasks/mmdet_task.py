"""Shared by the tasks whose model is an mmdet detector."""

from __future__ import annotations

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
    panoptic = hasattr(model, "panoptic_fusion_head")
    semantic = hasattr(model, "semantic_head") and not panoptic
    if (task == "panoptic") != panoptic:
        raise ConfigError(
            f'data.task is "panoptic" but detector "{name}" has no panoptic head'
            if task == "panoptic"
            else f'detector "{name}" has a panoptic head: set data.task to "panoptic"'
        )
    if (task == "semantic") != semantic:
        raise ConfigError(
            f'data.task is "semantic" but detector "{name}" finds objects: use "semantic_fpn_r50" or the like'
            if task == "semantic"
            else f'detector "{name}" gives each pixel a class and finds no objects: set data.task to "semantic"'
        )
    with_mask = bool(getattr(model, "with_mask", False))
    if task == "detection" and with_mask:
        raise ConfigError(
            f'detector "{name}" has a mask head: set data.task to "instance", '
            'or remove the head with detector.options {"roi_head.mask_head": null}'
        )
    if task == "instance" and not with_mask:
        raise ConfigError(f'data.task is "instance" but detector "{name}" has no mask head: use "detection"')
