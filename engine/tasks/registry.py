"""The tasks by their names in `data.task`."""

from __future__ import annotations

from importlib import import_module

from engine.config import RunConfig
from engine.tasks.base import Task

_TASKS = {
    "detection": "engine.tasks.detection:Detection",
    "instance": "engine.tasks.detection:Detection",
    "panoptic": "engine.tasks.panoptic:Panoptic",
    "semantic": "engine.tasks.semantic:Semantic",
    "classification": "engine.tasks.classification:Classification",
}


def task_of(config: RunConfig) -> Task:
    # By name, because a run needs one task and each imports its own libraries (mmdet, timm).
    module, name = _TASKS[config.data.task].split(":")
    return getattr(import_module(module), name)(config)
