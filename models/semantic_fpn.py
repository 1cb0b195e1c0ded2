"""Semantic FPN (Kirillov et al., Panoptic Feature Pyramid Networks, 2019): a pyramid gives every pixel a class.

Each level goes through 3x3 convolutions with normalisation and ReLU. Each convolution is followed by 2x upsampling,
until all levels have the finest stride. Their sum is classified at that stride, and the logits are upsampled to the
size of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmdet.models.detectors.base import BaseDetector
from mmdet.models.layers import ConvUpsample
from mmdet.registry import MODELS
from mmengine.model import BaseModule, ModuleList
from mmengine.structures import PixelData
from torch import nn

GROUP_NORM = dict(type="GN", num_groups=32)


@MODELS.register_module()
class SemanticFPNHead(BaseModule):
    """`strides` are those of the input levels, the finest first, each twice the one before.

    The loss is the mean cross-entropy over the pixels of a micro-batch that have a class.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        in_channels: int = 256,
        inner_channels: int = 128,
        strides: Sequence[int] = (4, 8, 16, 32),
        dropout: float = 0.1,
        ignore_index: int = 255,
        loss_weight: float = 1.0,
        norm_cfg: dict | None = GROUP_NORM,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if any(second != 2 * first for first, second in zip(strides, strides[1:])):
            raise ValueError(f"strides must double from level to level, got {list(strides)}")
        self.num_classes, self.ignore_index, self.loss_weight = num_classes, ignore_index, loss_weight
        self.scales = ModuleList(
            ConvUpsample(in_channels, inner_channels, num_layers=max(1, i), num_upsample=i, norm_cfg=norm_cfg)
            for i in range(len(strides))
        )
        self.dropout = nn.Dropout2d(dropout)
        self.conv_logits = nn.Conv2d(inner_channels, num_classes, 1)

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.normal_(self.conv_logits.weight, std=0.01)
        assert self.conv_logits.bias is not None
        nn.init.zeros_(self.conv_logits.bias)

    def forward(self, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logits at the finest stride."""
        merged = self.scales[0](levels[0])
        for scale, level in zip(list(self.scales)[1:], levels[1:]):
            merged = merged + scale(level)
        return self.conv_logits(self.dropout(merged))

    def loss_by_feat(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        total = F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="sum")
        # If no pixel has a class, the sum is zero, and the clamp avoids 0 / 0.
        counted = (labels != self.ignore_index).sum().clamp(min=1)
        right = ((logits.argmax(1) == labels).sum() / counted).detach()
        return {"loss_seg": self.loss_weight * total / counted, "acc_seg": 100 * right}

    def predict_by_feat(self, logits: torch.Tensor, metas: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """The class of every pixel of the original images, before resizing and padding."""
        padded = F.interpolate(logits, size=metas[0]["batch_input_shape"], mode="bilinear", align_corners=False)
        maps = []
        for image, meta in zip(padded, metas):
            height, width = meta["img_shape"][:2]
            image = F.interpolate(
                image[None, :, :height, :width], size=meta["ori_shape"][:2], mode="bilinear", align_corners=False
            )
            maps.append(image[0].argmax(0))
        return maps


@MODELS.register_module()
class SemanticFPN(BaseDetector):
    """A backbone, a pyramid and a `semantic_head`, with the interface of mmdet's detectors."""

    def __init__(
        self,
        *,
        backbone: dict,
        neck: dict,
        semantic_head: dict,
        data_preprocessor: dict | None = None,
        train_cfg: dict | None = None,
        test_cfg: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.backbone, self.neck = MODELS.build(backbone), MODELS.build(neck)
        self.semantic_head = MODELS.build(semantic_head)

    def extract_feat(self, batch_inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.neck(self.backbone(batch_inputs))

    def loss(self, batch_inputs: torch.Tensor, batch_data_samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        labels = torch.cat([sample.gt_sem_seg.sem_seg for sample in batch_data_samples]).long()
        return self.semantic_head.loss_by_feat(self._forward(batch_inputs), labels)

    def predict(
        self, batch_inputs: torch.Tensor, batch_data_samples: Sequence[Any], rescale: bool = True
    ) -> Sequence[Any]:
        """The samples with `pred_sem_seg.sem_seg`, a class for every pixel of the original image."""
        if not rescale:
            raise ValueError("SemanticFPN predicts at the size of the original image (rescale=True)")
        maps = self.semantic_head.predict_by_feat(
            self._forward(batch_inputs), [sample.metainfo for sample in batch_data_samples]
        )
        for sample, labels in zip(batch_data_samples, maps):
            sample.pred_sem_seg = PixelData(sem_seg=labels[None])
        return batch_data_samples

    def _forward(self, batch_inputs: torch.Tensor, batch_data_samples: Any = None) -> torch.Tensor:
        return self.semantic_head(self.extract_feat(batch_inputs))
