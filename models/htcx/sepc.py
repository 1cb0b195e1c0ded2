"""SEPC, the scale-equalising pyramid convolution: a kernel that also slides over the levels, like a 3D convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.htcx.deformable import DeformableConv


class PyramidConv(nn.Module):
    """y[l] = w1 * x[l] + w2 * (stride 2) x[l-1] + up(w0 * x[l+1]), then ReLU(BN(y)) with one BN for all levels.

    Weights are shared across levels. The finest level uses plain convolutions. The coarser levels are more blurred:
    there the offsets let the kernel keep its scale. BN takes its statistics over the pixels of all levels together,
    because the weights are shared and coarse levels have few pixels. There are no biases, as BN follows.
    """

    def __init__(self, channels: int, *, offset_groups: int = 1, align_corners: bool = True) -> None:
        super().__init__()
        self.align_corners = align_corners
        self.from_coarser = DeformableConv(channels, channels, offset_groups=offset_groups)  # w0
        self.same = DeformableConv(channels, channels, offset_groups=offset_groups)  # w1
        self.from_finer = DeformableConv(channels, channels, stride=2, offset_groups=offset_groups)  # w2
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        outs = []
        for level, x in enumerate(maps):
            deform = level > 0
            y = self.same(x, deform=deform)
            if level > 0:
                y = y + self._fit(self.from_finer(maps[level - 1], deform=deform), x)
            if level + 1 < len(maps):
                y = y + self._fit(self.from_coarser(maps[level + 1], deform=deform), x)
            outs.append(y)
        return [F.relu(y) for y in integrated_norm(self.norm, outs)]

    def _fit(self, y: Tensor, like: Tensor) -> Tensor:
        """Upsamples the coarser level. The finer one fits by its stride, unless the backbone rounds sizes down."""
        if y.shape[2:] == like.shape[2:]:
            return y
        return F.interpolate(y, size=like.shape[2:], mode="bilinear", align_corners=self.align_corners)


class SEPC(nn.Module):
    """`depth` pyramid convolutions in a row, without SEPC's additional convolutions for one-stage heads.

    The defaults of `align_corners` (for upsampling) and `offset_groups` are those of the published source.
    """

    def __init__(self, channels: int, depth: int = 4, *, offset_groups: int = 1, align_corners: bool = True) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            PyramidConv(channels, offset_groups=offset_groups, align_corners=align_corners) for _ in range(depth)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        for conv in self.convs:
            maps = conv(maps)
        return list(maps)


def integrated_norm(norm: nn.Module, maps: Sequence[Tensor]) -> list[Tensor]:
    """Apply `norm` to the pixels of all levels at once: (N, C, sum of HW, 1)."""
    pixels = norm(torch.cat([m.flatten(2) for m in maps], 2).unsqueeze(3)).squeeze(3)
    parts = pixels.split([m.shape[2] * m.shape[3] for m in maps], 2)
    return [part.unflatten(2, m.shape[2:]) for part, m in zip(parts, maps)]
