"""UniNet as an mmdet backbone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmdet.registry import MODELS
from mmengine.model import BaseModule
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.batch_norm import convert_batch_norm, keep_statistics
from models.recompute import recomputed
from models.uninet.blocks import (
    ConvBlock,
    LocalDownsample,
    LocalGlobalDownsample,
    TransformerBlock,
    fused_block,
    last_norm,
)
from models.uninet.variants import CONV_STAGES, STEM_CHANNELS, STRIDES, Variant, variant


class Stage(nn.Module):
    """The down-sampling module that changes channels and stride (none in stage 0), and the blocks that keep both."""

    def __init__(self, downsample: nn.Module | None, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsample = nn.Identity() if downsample is None else downsample
        self.blocks = nn.ModuleList(blocks)


@MODELS.register_module()
class UniNet(BaseModule):
    """Maps of the stages in `out_indices`, at any input size: stage i has stride (2, 4, 8, 16, 16, 32)[i].

    arch: "b0" ... "b6", "g", "tiny", or the fields of a `Variant` (with "base" to change a known one).
    drop_path_rate: of the last block; grows linearly over all blocks, down-sampling modules excluded.
    frozen_stages: as mmdet has it: -1 none, 0 the stem, k the stem and the first k stages.
    norm_cfg: type "BN" or "SyncBN" (over all ranks, on CPUs too); requires_grad false freezes its weights.
    norm_eval: batch norm keeps its running statistics while training.
    with_cp: recompute each block in backward.
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] = "b1",
        in_channels: int = 3,
        out_indices: Sequence[int] = (2, 4, 5),
        drop_path_rate: float = 0.0,
        layer_scale: float = 1e-6,
        frozen_stages: int = -1,
        norm_cfg: Mapping[str, Any] | None = None,
        norm_eval: bool = False,
        with_cp: bool = False,
        init_cfg: Any = None,
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.variant = variant(arch)
        self.out_indices = tuple(out_indices)
        if not self.out_indices or not all(0 <= i < len(STRIDES) for i in self.out_indices):
            raise ValueError(f"UniNet's out_indices are stages 0 to {len(STRIDES) - 1}, got {self.out_indices}")
        if not -1 <= frozen_stages <= len(STRIDES):
            raise ValueError(f"UniNet's frozen_stages is -1 to {len(STRIDES)}, got {frozen_stages}")
        self.frozen_stages, self.norm_eval, self.with_cp = frozen_stages, norm_eval, with_cp
        self.layer_scale = layer_scale
        self.channels = [self.variant.channels[i] for i in self.out_indices]
        self.strides = [STRIDES[i] for i in self.out_indices]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, STEM_CHANNELS, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(STEM_CHANNELS),
            nn.GELU(),
        )
        self.stages = nn.ModuleList(self._stages(self.variant, drop_path_rate))
        norm_cfg = {"type": "BN", "requires_grad": True, **(norm_cfg or {})}
        if norm_cfg["type"] not in ("BN", "SyncBN"):
            raise ValueError(f"UniNet's norm_cfg is of type BN or SyncBN, got {norm_cfg['type']}")
        if norm_cfg["type"] == "SyncBN":
            convert_batch_norm(self, synchronise=True)
        if not norm_cfg["requires_grad"]:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.requires_grad_(False)
        for module in self._frozen():
            module.requires_grad_(False)

    def _stages(self, v: Variant, drop_path_rate: float) -> list[Stage]:
        rates = torch.linspace(0, drop_path_rate, sum(v.depths), device="cpu", dtype=torch.float64).tolist()
        stages, in_channels, attending = [], STEM_CHANNELS, 0
        for i, (channels, depth, expansion) in enumerate(zip(v.channels, v.depths, v.expansions)):
            downsample = None
            if i > 0:
                kind = LocalDownsample if i < CONV_STAGES else LocalGlobalDownsample
                downsample, in_channels = kind(in_channels, channels, STRIDES[i] // STRIDES[i - 1]), channels
            blocks: list[nn.Module] = []
            for _ in range(depth):
                rate = rates.pop(0)
                if i < CONV_STAGES:
                    make = fused_block if v.fused else ConvBlock
                    blocks.append(make(in_channels, channels, expansion, rate))
                else:
                    window = (
                        v.windows[i - CONV_STAGES] if v.attention[attending % len(v.attention)] == "window" else None
                    )
                    blocks.append(
                        TransformerBlock(
                            channels, expansion, window=window, drop_path=rate, layer_scale=self.layer_scale
                        )
                    )
                    attending += 1
                in_channels = channels
            stages.append(Stage(downsample, blocks))
        return stages

    def init_weights(self) -> None:
        """Every weight anew, so that a model built partitioned (zero.Init) starts as a plain one does."""
        self.reset_parameters()
        super().init_weights()  # an init_cfg of the user's comes last

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1] // module.groups
                nn.init.normal_(module.weight, 0.0, (2.0 / fan_out) ** 0.5)
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, (_BatchNorm, nn.LayerNorm)):
                nn.init.ones_(module.weight)
            elif isinstance(module, LayerScale):
                nn.init.constant_(module.gamma, self.layer_scale)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        for stage in self.stages[:CONV_STAGES]:
            for block in stage.blocks:
                norm = last_norm(block)
                if norm is not None:
                    nn.init.zeros_(norm.weight)

    def forward_stages(self, x: Tensor, last: int) -> list[Tensor]:
        """The outputs of the stages up to `last`."""
        maps = []
        # Channels-last: faster convolutions, and tokens are a view.
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages[: last + 1]:
            x = stage.downsample(x)
            for block in stage.blocks:
                x = recomputed(block, x) if self.with_cp and self.training else block(x)
            maps.append(x)
        return maps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.forward_stages(x, max(self.out_indices))
        return tuple(maps[i] for i in self.out_indices)

    def _frozen(self) -> list[nn.Module]:
        return [] if self.frozen_stages < 0 else [self.stem, *self.stages[: self.frozen_stages]]

    def train(self, mode: bool = True) -> UniNet:
        super().train(mode)
        for module in self._frozen():
            module.eval()
        if mode and self.norm_eval:
            keep_statistics(self)
        return self
