"""RevFP, the reverse feature pyramid of RCNet: both directions of fusion in one bottom-up pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.htcx.deformable import DeformableBlock
from models.mmcv_kernels.precision import widen


class Fusion(nn.Module):
    """BN(DCN(ReLU(w a + (1 - w) A b))), where w = sigmoid(conv1x1[GAP a; GAP b]) is one number per image.

    If `guided`, A = HW softmax over HW of (T / sqrt(C) conv3x3[a; b]) weighs the pixels of b, the coarse map upsampled
    to the size of a. Otherwise A = 1. Both convolutions start at zero: w = 1/2 and A = 1. The 3x3 has no bias, as the
    softmax would cancel it. T is a vector of one element, because DeepSpeed's ZeRO does not take scalars.
    """

    def __init__(self, channels: int, *, guided: bool, offset_groups: int) -> None:
        super().__init__()
        self.weigh = nn.Conv2d(2 * channels, 1, 1)
        self.attend = nn.Conv2d(2 * channels, 1, 3, padding=1, bias=False) if guided else None
        self.temperature = nn.Parameter(torch.ones(1)) if guided else None
        self.out = DeformableBlock(channels, offset_groups=offset_groups)
        self.start_neutral()

    def start_neutral(self) -> None:
        for parameter in self.weigh.parameters():
            nn.init.zeros_(parameter)
        if self.attend is not None and self.temperature is not None:
            nn.init.zeros_(self.attend.weight)
            nn.init.ones_(self.temperature)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        w = torch.sigmoid(self.weigh(torch.cat([a, b], 1).mean((2, 3), keepdim=True)))
        if self.attend is not None and self.temperature is not None:
            logits = self.temperature * a.shape[1] ** -0.5 * self.attend(torch.cat([a, b], 1))
            [wide] = widen(logits)  # in bf16 the shares of a large map would be too coarse
            share = wide.flatten(1).softmax(1)
            b = (share * share.shape[1]).view_as(logits).to(b.dtype) * b
        return self.out(w * a + (1 - w) * b)


class RevFP(nn.Module):
    """P[i] = f(C[i], C[i+1], P[i-1]), from the finest level to the coarsest:

    P'[i] = fuse(C[i], A up(C[i+1])), except at the coarsest level, where P' = C, and then
    P[i] = fuse(P'[i], max-pool of P[i-1]), except at the finest level, where P = P'.
    """

    def __init__(self, channels: int, levels: int = 3, *, offset_groups: int = 2) -> None:
        super().__init__()
        if levels < 2:
            raise ValueError(f"RevFP fuses 2 levels or more, got {levels}")
        self.with_coarser = nn.ModuleList(
            Fusion(channels, guided=True, offset_groups=offset_groups) for _ in range(levels - 1)
        )
        self.with_finer = nn.ModuleList(
            Fusion(channels, guided=False, offset_groups=offset_groups) for _ in range(levels - 1)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        outs: list[Tensor] = []
        for i, p in enumerate(maps):
            size = p.shape[2:]
            if i + 1 < len(maps):
                up = F.interpolate(maps[i + 1], size=size, mode="bilinear", align_corners=False)
                p = self.with_coarser[i](p, up)
            if i > 0:
                p = self.with_finer[i - 1](p, _halve(outs[-1], size))
            outs.append(p)
        return outs


def _halve(x: Tensor, size: torch.Size) -> Tensor:
    """2x2 max-pool, sizes rounded up. If the backbone rounds its sizes in another way, adaptive windows are used."""
    pooled = F.max_pool2d(x, 2, ceil_mode=True)
    return pooled if pooled.shape[2:] == size else F.adaptive_max_pool2d(x, size)
