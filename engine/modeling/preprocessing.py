"""Turn the loader's lists into one batch on the device."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from mmengine.structures import InstanceData

from engine.modeling.detector import one_class
from engine.modeling.pixel_classes import draw_class_map, has_semantic_branch
from engine.modeling.precision import Precision


class Preprocess(Protocol):
    """Turns a batch of the loader into the inputs of `model.predict` or `model.loss`."""

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[Any, Any]: ...


class Preprocessor:
    """The detector's data preprocessor, kept in fp32 outside DeepSpeed's engine: in bf16 a mean of 123.675 is 123.5."""

    def __init__(self, model: Any, device: torch.device, precision: Precision) -> None:
        self._preprocess: Any = copy.deepcopy(model.data_preprocessor).to(device)
        self._dtype = precision.dtype
        self._one_class = one_class(model)
        # YOLACT takes all images of a micro-batch for equally large: the others' padding counts as background.
        self._even = type(getattr(model, "bbox_head", None)).__name__ == "YOLACTHead"
        self._background = model.roi_head.semantic_head.num_classes - 1 if has_semantic_branch(model) else None

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[torch.Tensor, list[Any]]:
        data = self._preprocess(batch, training)
        for sample in data["data_samples"]:
            _complete(sample)
            if self._even:
                sample.set_metainfo({"pad_shape": sample.batch_input_shape})
            if training and self._one_class:
                sample.gt_instances.labels = torch.zeros_like(sample.gt_instances.labels)
                _give_company(sample)
            if training and self._background is not None and "gt_sem_seg" not in sample:
                draw_class_map(sample, self._background)
        return data["inputs"].to(self._dtype), data["data_samples"]


def _complete(sample: Any) -> None:
    """CenterNet and CornerNet subtract the border that mmdet's own pipeline for them adds around an image. Here images
    are padded on the right and at the bottom only."""
    if hasattr(sample, "set_metainfo") and "border" not in sample:
        sample.set_metainfo({"border": [0.0, 0.0, 0.0, 0.0]})


def _give_company(sample: Any) -> None:
    """CrowdDet assigns two objects to every region, and mmdet (3.5.1) fails where an image has only one: add ignored
    objects without extent, which no region overlaps."""
    lacking = 2 - len(sample.gt_instances) - len(sample.ignored_instances)
    if lacking > 0:
        boxes, labels = sample.ignored_instances.bboxes, sample.ignored_instances.labels
        kept = boxes.tensor if hasattr(boxes, "tensor") else boxes
        sample.ignored_instances = InstanceData(
            bboxes=torch.cat([kept, kept.new_zeros(lacking, 4)]),
            labels=torch.cat([labels, labels.new_zeros(lacking)]),
        )
