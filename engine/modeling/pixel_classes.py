"""Class maps for the semantic branch of HTC and SCNet, drawn from the masks of the objects.

mmdet trains the branch on COCO's stuff maps. Annotations of objects have none, so a pixel has the class of the object
that covers it, or the class after the last one, the background. Padding is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.structures import PixelData
from torch import nn

IGNORED = 255  # `ignore_index` in the configs of these detectors


def has_semantic_branch(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "roi_head", None), "with_semantic", False))


def draw_class_map(sample: Any, background: int) -> None:
    """Add `gt_sem_seg`, of the size of the batch, to a data sample. Its masks may be padded already."""
    masks, labels = sample.gt_instances.masks, sample.gt_instances.labels
    height, width = sample.batch_input_shape
    shown_height, shown_width = sample.img_shape[:2]
    classes = torch.full((height, width), IGNORED, dtype=torch.long)
    classes[:shown_height, :shown_width] = background
    shapes = torch.as_tensor(masks.to_ndarray(), dtype=torch.bool)
    for place in shapes.flatten(1).sum(1).argsort(descending=True).tolist():  # the smallest object is on top
        classes[: shapes.shape[1], : shapes.shape[2]][shapes[place]] = int(labels[place])
    sample.gt_sem_seg = PixelData(sem_seg=classes[None].to(labels.device))
