"""Any timm feature extractor as an mmdet backbone: `dict(type="TimmBackbone", model_name="resnet18d")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
import torch
from mmdet.registry import MODELS
from mmengine.model import BaseModule

from models.batch_norm import keep_statistics

# Arguments of timm.create_model with which it reads files or downloads.
_FROM_FILES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


@MODELS.register_module()
class TimmBackbone(BaseModule):
    """`timm.create_model(model_name, features_only=True)`. Weights come from a file, never from a download.

    `out_indices` counts timm's feature levels (strides 2, 4, 8, ... for most models). There is no `frozen_stages`: use
    `detector.frozen`, which works for every model. `channels` holds the width of each output.
    """

    def __init__(
        self,
        model_name: str,
        *,
        out_indices: Sequence[int] = (1, 2, 3, 4),
        norm_eval: bool = False,
        init_cfg: dict | None = None,
        **options: Any,
    ) -> None:
        super().__init__(init_cfg)
        for option in _FROM_FILES & options.keys():
            raise ValueError(f"TimmBackbone takes no {option}: weights come from detector.load_from")
        if not timm.is_model(model_name):
            import difflib

            close = difflib.get_close_matches(model_name, timm.list_models(), n=3)
            raise ValueError(f'timm has no model "{model_name}"' + (f", but {', '.join(close)}" if close else ""))
        self.body = timm.create_model(
            model_name, pretrained=False, features_only=True, out_indices=tuple(out_indices), **options
        )
        self.channels = list(self.body.feature_info.channels())
        self.norm_eval = norm_eval
        # Some hybrids (Swin, ConvNeXt with a format option) return maps as N, H, W, C.
        self._channels_last = (
            getattr(self.body, "output_fmt", "NCHW") == "NHWC"
            or getattr(getattr(self.body, "model", None), "output_fmt", "NCHW") == "NHWC"
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        maps = self.body(images)
        if self._channels_last:
            maps = [m.permute(0, 3, 1, 2).contiguous() for m in maps]
        return tuple(maps)

    def train(self, mode: bool = True) -> TimmBackbone:
        super().train(mode)
        if mode and self.norm_eval:
            keep_statistics(self)
        return self
