"""CSN, the cross-scale shift network of RCNet: some channels move between all levels, near and far, in one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.mmcv_kernels.precision import widen

SHIFTS = (1, -1, 2, -2)
SHARE = 16


class AttentionPool(nn.Module):
    """conv1x1(sum over s of softmax over s of (conv1x1 x) x[s]) for x of (N, C, S): a context of (N, C).

    The first convolution has no bias, as the softmax would cancel it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.logits = nn.Conv1d(channels, 1, 1, bias=False)
        self.project = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        [logits] = widen(self.logits(x))
        share = logits.softmax(2).to(x.dtype)
        return self.project((x * share).sum(2, keepdim=True)).squeeze(2)


class CrossScaleShift(nn.Module):
    """All levels are resized to one size, X[l] = resize(x[l]). Four groups of C/16 channels come from other levels:

    S[l] = [X[l+1] group 0; X[l-1] group 1; X[l+2] group 2; X[l-2] group 3; X[l]], levels counted in a circle,
    Y[l] = X[l] + conv1x1(ReLU(BN(conv1x1 S[l]))) with weights per level, 1.25 C -> C -> C,
    y[l] = x[l] + resize(Y[l] + spatial context + scale context).

    The spatial context attends to the pixels of Y averaged over levels. The scale context attends to the levels of Y
    averaged over pixels. Maps are downsized by max-pooling and upsampled bilinearly. `meeting_level` is the level whose
    size all levels take (default: the middle one).
    """

    def __init__(self, channels: int, levels: int = 3, *, meeting_level: int | None = None) -> None:
        super().__init__()
        if channels % SHARE:
            raise ValueError(f"the shift moves sixteenths of the channels: channels must divide by 16, got {channels}")
        self.meeting_level = levels // 2 if meeting_level is None else meeting_level
        if not 0 <= self.meeting_level < levels:
            raise ValueError(f"meeting_level must be one of the {levels} levels, counted from 0, got {meeting_level}")
        wide = channels + len(SHIFTS) * channels // SHARE
        self.mix = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 1),
            )
            for _ in range(levels)
        )
        self.spatial_context = AttentionPool(channels)
        self.scale_context = AttentionPool(channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        size = maps[self.meeting_level].shape[2:]
        x = torch.stack([_resize(m, size) for m in maps], 1)  # N, L, C, H, W
        y = x + torch.stack([mix(s) for mix, s in zip(self.mix, self.shift(x).unbind(1))], 1)
        context = self.spatial_context(y.mean(1).flatten(2)) + self.scale_context(y.mean((3, 4)).transpose(1, 2))
        y = y + context[:, None, :, None, None]
        return [m + _resize(level, m.shape[2:]) for m, level in zip(maps, y.unbind(1))]

    @staticmethod
    def shift(x: Tensor) -> Tensor:
        """(N, L, C, H, W) -> (N, L, 1.25 C, H, W): the four groups from other levels, then the level itself."""
        part = x.shape[2] // SHARE
        groups = x[:, :, : len(SHIFTS) * part].split(part, 2)
        return torch.cat([*(g.roll(-step, 1) for g, step in zip(groups, SHIFTS)), x], 2)


def _resize(x: Tensor, size: torch.Size) -> Tensor:
    if x.shape[2:] == size:
        return x
    if x.shape[2] >= size[0] and x.shape[3] >= size[1]:
        return F.adaptive_max_pool2d(x, size)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
