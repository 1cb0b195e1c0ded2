"""HTC-X's box head: one transformer over the pixels of a region for its class, another for its box."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.registry import MODELS
from timm.models.vision_transformer import Block
from torch import Tensor, nn

POOLINGS = ("mean", "token", "flatten")


class Tower(nn.Module):
    """Pre-norm transformer blocks over the pixels of a region, with learned positions. Gives one vector per region."""

    def __init__(self, channels: int, tokens: int, depth: int, heads: int, mlp_ratio: float, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.position = nn.Parameter(torch.zeros(1, tokens, channels))
        self.token = nn.Parameter(torch.zeros(1, 1, channels)) if pooling == "token" else None
        self.blocks = nn.ModuleList(Block(channels, heads, mlp_ratio=mlp_ratio, qkv_bias=True) for _ in range(depth))
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        # Regions are always cropped in fp32, and a norm does not accept mixed types.
        x = x.flatten(2).transpose(1, 2).to(self.position.dtype) + self.position
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        if self.pooling == "mean":
            return self.norm(x.mean(1))
        return self.norm(x[:, 0] if self.pooling == "token" else x).flatten(1)


@MODELS.register_module()
class DecoupledTransformerBoxHead(BBoxHead):
    """`cls_depth` blocks for classification and `reg_depth` for localisation (the paper: 4 and 4), nothing shared.

    Inferred, and therefore options: 7x7 pixels as tokens, 8 heads, an MLP as wide as the tokens, mean pooling ("token"
    adds a class token, "flatten" keeps all pixels for the last layer), and class-agnostic boxes.
    """

    def __init__(
        self,
        cls_depth: int = 4,
        reg_depth: int = 4,
        num_heads: int = 8,
        mlp_ratio: float = 1.0,
        pooling: str = "mean",
        reg_class_agnostic: bool = True,
        **options: Any,
    ) -> None:
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is one of {', '.join(POOLINGS)}, got {pooling!r}")
        super().__init__(with_avg_pool=pooling != "flatten", reg_class_agnostic=reg_class_agnostic, **options)
        shape = (num_heads, mlp_ratio, pooling)
        self.cls_tower = Tower(self.in_channels, self.roi_feat_area, cls_depth, *shape)
        self.reg_tower = Tower(self.in_channels, self.roi_feat_area, reg_depth, *shape)

    def init_weights(self) -> None:
        for tower in (self.cls_tower, self.reg_tower):
            for module in tower.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                elif isinstance(module, nn.LayerNorm):
                    nn.init.ones_(module.weight)
                if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            for embedding in (tower.position, tower.token):
                if embedding is not None:
                    nn.init.trunc_normal_(embedding, std=0.02)
        super().init_weights()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc_cls(self.cls_tower(x)), self.fc_reg(self.reg_tower(x))
