"""The backbones that an mmdet pipeline can use: what changes in its config, and the weights to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.recipes.setting import Setting

_SWIN_T = dict(
    _delete_=True,
    type="SwinTransformer",
    embed_dims=96,
    depths=[2, 2, 6, 2],
    num_heads=[3, 6, 12, 24],
    window_size=7,
    mlp_ratio=4,
    qkv_bias=True,
    drop_path_rate=0.2,
    patch_norm=True,
    out_indices=[0, 1, 2, 3],
)


@dataclass(frozen=True, kw_only=True)
class Backbone:
    options: Mapping[str, Any]  # of detector.options
    table: str  # the optimizer of its table in A.5: SGD for CNNs, AdamW for Transformers
    weights: str  # pre-trained on ImageNet; nothing is downloaded, so the user puts the file there
    batch_norm: bool = False
    norm_decay: bool = True
    extra_epochs: int = 0  # added to the pipeline's epochs

    def settings(self) -> list[Setting]:
        found = [
            Setting(f"detector.options.{key}", value, "the recipe's backbone") for key, value in self.options.items()
        ]
        if self.batch_norm:
            found += [
                Setting("detector.options.backbone.norm_eval", False, "batch-norm statistics are trained", "code"),
                Setting("detector.sync_bn", True, "batch-norm statistics over all ranks", "code"),
            ]
        if not self.norm_decay:
            found.append(Setting("optimizer.paramwise.norm_decay", False, "as Swin's authors train it", "ours"))
        return found


BACKBONES = {
    "r18": Backbone(
        options={"backbone.depth": 18, "neck.in_channels": [64, 128, 256, 512]},
        table="sgd",
        weights="weights/resnet18.pth",
        batch_norm=True,
    ),
    # mmdet's configs already have this backbone.
    "r50": Backbone(options={}, table="sgd", weights="weights/resnet50.pth", batch_norm=True),
    "swin_t": Backbone(
        options={"backbone": _SWIN_T, "neck.in_channels": [96, 192, 384, 768]},
        table="adamw",
        weights="weights/swin_tiny.pth",
        norm_decay=False,
        extra_epochs=1,
    ),
}
