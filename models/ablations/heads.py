"""RetinaNet's head and the RPN with separate layers for every level, or with a share of the pixels ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.registry import MODELS
from mmengine.model import ModuleList
from torch import Tensor

_Head: Any = object  # the classes below extend an mmdet head, which stands behind them in the list of bases


class _IndependentLevels(_Head):
    """`independent_levels`: each level has layers of its own, so that no level adds to the batch of another."""

    shared: type  # mmdet's head

    def __init__(self, *args: Any, independent_levels: bool = False, **kwargs: Any) -> None:
        self.independent_levels = independent_levels
        if not independent_levels:
            super().__init__(*args, **kwargs)
            return
        # This head only joins the outputs of the levels' heads and computes the losses. mmengine's ModuleList lets the
        # levels' heads initialise themselves; torch's would not.
        super().__init__(*args, **{**kwargs, "init_cfg": None})
        self.levels = ModuleList(self.shared(*args, **kwargs) for _ in range(self.prior_generator.num_levels))

    def _init_layers(self) -> None:
        if not self.independent_levels:
            super()._init_layers()

    def forward(self, features: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        if not self.independent_levels:
            return super().forward(features)
        outputs = [head.forward_single(feature) for head, feature in zip(self.levels, features, strict=True)]
        return tuple(list(output) for output in zip(*outputs))


class _IgnoredPixels(_Head):
    """`ignored_pixels`: the share of pixels whose anchors do not count in the loss, drawn for each image and level.

    The sums are divided by the remaining share, so that the expected loss stays the same. This is our choice: the paper
    does not say.
    """

    def __init__(self, *args: Any, ignored_pixels: float = 0.0, **kwargs: Any) -> None:
        self.ignored_pixels = ignored_pixels
        super().__init__(*args, **kwargs)

    def loss_by_feat_single(
        self,
        cls_score: Tensor,
        bbox_pred: Tensor,
        anchors: Tensor,
        labels: Tensor,
        label_weights: Tensor,
        bbox_targets: Tensor,
        bbox_weights: Tensor,
        avg_factor: Any,
    ) -> tuple:
        if self.ignored_pixels:
            images, _, height, width = cls_score.shape
            kept = torch.rand(images, height * width, device=cls_score.device) >= self.ignored_pixels
            # The anchors of a pixel are neighbours.
            kept = kept.repeat_interleave(label_weights.shape[1] // kept.shape[1], dim=1)
            label_weights = label_weights * kept
            bbox_weights = bbox_weights * kept.unsqueeze(-1)
            avg_factor = avg_factor * (1 - self.ignored_pixels)
        return super().loss_by_feat_single(
            cls_score, bbox_pred, anchors, labels, label_weights, bbox_targets, bbox_weights, avg_factor
        )


@MODELS.register_module()
class AblatedRetinaHead(_IgnoredPixels, _IndependentLevels, RetinaHead):
    shared = RetinaHead


@MODELS.register_module()
class AblatedRPNHead(_IgnoredPixels, _IndependentLevels, RPNHead):
    shared = RPNHead


ABLATED = {"RetinaHead": "AblatedRetinaHead", "RPNHead": "AblatedRPNHead"}
