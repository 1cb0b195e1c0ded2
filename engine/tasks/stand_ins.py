"""Made-up data samples for planning a step: a fixed number of boxes, labels and maps at the size of the image."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.structures import DetDataSample  # noqa: E402
from mmdet.structures.mask import BitmapMasks  # noqa: E402
from mmengine.structures import InstanceData, PixelData  # noqa: E402


def mmdet_samples(
    things: int, *, micro: int, height: int, width: int, objects: int, masks: bool, maps: bool
) -> list[DetDataSample]:
    """Data samples as the loader gives them, one for each image: boxes, and on request masks and class maps."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(micro):
        sample = DetDataSample(
            metainfo=dict(
                img_shape=(height, width),
                pad_shape=(height, width),
                ori_shape=(height, width),
                batch_input_shape=(height, width),
                scale_factor=(1.0, 1.0),
            )
        )
        sample.gt_instances = InstanceData(
            bboxes=random_boxes(objects, height, width, generator),
            labels=torch.randint(0, things, (objects,), generator=generator),
        )
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        if masks:
            sample.gt_instances.masks = BitmapMasks(np.ones((objects, height, width), np.uint8), height, width)
        if maps:
            sample.gt_sem_seg = PixelData(sem_seg=torch.zeros(1, height, width, dtype=torch.long))
        samples.append(sample)
    return samples


def random_boxes(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Boxes whose sides are a twentieth to a half of the image's sides."""
    sides = torch.tensor([width, height], dtype=torch.float32)
    extent = sides * (0.05 + 0.45 * torch.rand(count, 2, generator=generator))
    corner = torch.rand(count, 2, generator=generator) * (sides - extent)
    return torch.cat([corner, corner + extent], 1)


def proposals_near(sample: Any, count: int) -> Any:
    """As many regions as an RPN may propose: every other one near an object, the rest anywhere."""
    height, width = sample.img_shape
    objects = sample.gt_instances.bboxes
    generator = torch.Generator().manual_seed(1)
    number = torch.arange(count)
    near = objects[number % len(objects)] + torch.rand(count, 4, generator=generator)
    boxes = torch.where((number % 2 == 0)[:, None], near, random_boxes(count, height, width, generator))
    return InstanceData(
        bboxes=boxes, scores=torch.rand(count, generator=generator), labels=torch.zeros(count, dtype=torch.long)
    )
