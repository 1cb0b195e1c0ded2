"""UniNet in plain torch: the stem and the six stages that the timm classifier and the mmdet backbone share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
from models.uninet.variants import CONV_STAGES, STEM_CHANNELS, STRIDES, variant


class Stage(nn.Module):
    """The down-sampling module that changes channels and stride (none in stage 0), and the blocks that keep both."""

    def __init__(self, downsample: nn.Module | None, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsample = nn.Identity() if downsample is None else downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = recomputed(block, x) if recompute else block(x)
        return x


class UniNetStages(nn.Module):
    """Takes images of any size. The map of stage i has stride (2, 4, 8, 16, 16, 32)[i].

    arch: "b0" ... "b6", "g", "tiny", or the fields of a `Variant` (with "base" to change a known one).
    drop_path_rate: of the last block. It grows linearly over all blocks; down-sampling modules do not count.
    frozen_stages: as in mmdet: -1 freezes nothing, 0 the stem, k the stem and the first k stages.
    norm_cfg: type "BN" or "SyncBN" (over all ranks, on CPUs too); requires_grad=False freezes the weights of the norms.
    norm_eval: batch norm uses its running statistics in training and does not update them.
    with_cp: recompute each block in backward.
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] = "b1",
        in_channels: int = 3,
        drop_path_rate: float = 0.0,
        layer_scale: float = 1e-6,
        frozen_stages: int = -1,
        norm_cfg: Mapping[str, Any] | None = None,
        norm_eval: bool = False,
        with_cp: bool = False,
    ) -> None:
        super().__init__()
        self.variant = variant(arch)
        if not -1 <= frozen_stages <= len(STRIDES):
            raise ValueError(f"UniNet's frozen_stages is -1 to {len(STRIDES)}, got {frozen_stages}")
        self.frozen_stages, self.norm_eval, self.with_cp = frozen_stages, norm_eval, with_cp
        self.layer_scale = layer_scale
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, STEM_CHANNELS, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(STEM_CHANNELS),
            nn.GELU(),
        )
        self.stages = nn.ModuleList(self._stages(drop_path_rate))
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

    def _stages(self, drop_path_rate: float) -> list[Stage]:
        v = self.variant
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
                    windowed = v.attention[attending % len(v.attention)] == "window"
                    window = v.windows[i - CONV_STAGES] if windowed else None
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
        """Initialise every weight again, so that a model built partitioned (zero.Init) starts as a plain one does."""
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
            bias = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)
        for stage in self.stages[:CONV_STAGES]:
            assert isinstance(stage, Stage)
            for block in stage.blocks:
                norm = last_norm(block)
                if norm is not None:
                    nn.init.zeros_(norm.weight)

    def forward_stages(self, x: Tensor, last: int) -> list[Tensor]:
        """The maps of stages 0 to `last`."""
        maps = []
        # Channels-last: convolutions are faster, and tokens are a view of the map.
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for stage in self.stages[: last + 1]:
            x = stage(x, self.with_cp and self.training)
            maps.append(x)
        return maps

    def _frozen(self) -> list[nn.Module]:
        return [] if self.frozen_stages < 0 else [self.stem, *self.stages[: self.frozen_stages]]

    def train(self, mode: bool = True) -> UniNetStages:
        super().train(mode)
        for module in self._frozen():
            module.eval()
        if mode and self.norm_eval:
            keep_statistics(self)
        return self
