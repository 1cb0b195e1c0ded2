"""Deformable convolution that predicts its own offsets, and the pyramid block that uses it.

The offsets start at zero, so that training starts from a plain convolution. torchvision does not have half-precision
kernels on every device, so it computes in fp32 here. torchvision 0.29 reads memory at random for an offset that is NaN;
here the output is NaN at that place, so that it shows in the loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import deform_conv2d

from models.batch_norm import Fp32BatchNorm
from models.mmcv_kernels.precision import widen


class DeformableConv(nn.Conv2d):
    """y(p) = sum over taps k of w_k x(p + k + d_k(p)), a 3x3 convolution with offsets d = conv3x3(x).

    The input channels form `offset_groups` groups, and each group has its own offsets.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, offset_groups: int = 1) -> None:
        if in_channels % offset_groups:
            raise ValueError(f"offset_groups must divide the {in_channels} input channels, got {offset_groups}")
        super().__init__(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.offset = nn.Conv2d(in_channels, offset_groups * 2 * 9, 3, stride=stride, padding=1)
        self.start_neutral()

    def start_neutral(self) -> None:
        for parameter in self.offset.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, *, deform: bool = True) -> Tensor:
        """With `deform=False`, a plain convolution with the same weights."""
        if not deform:
            return super().forward(x)
        offset = self.offset(x)
        with torch.autocast(x.device.type, enabled=False):
            wide, weight, shift = widen(x, self.weight, offset)
            y = deform_conv2d(wide, shift.nan_to_num(0), weight, stride=self.stride, padding=self.padding)
            return y.masked_fill(shift.isnan().any(1, keepdim=True), torch.nan).to(x.dtype)


class DeformableBlock(nn.Module):
    """y = BN(DCN(ReLU(x))), or without the ReLU."""

    def __init__(self, channels: int, *, stride: int = 1, offset_groups: int = 1, relu: bool = True) -> None:
        super().__init__()
        self.relu = relu
        self.conv = DeformableConv(channels, channels, stride=stride, offset_groups=offset_groups)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self.norm, self.conv(F.relu(x) if self.relu else x))


def _normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)`. torch refuses one pixel of one image, as it has no variance: the running statistics are used then."""
    synchronised = isinstance(norm, Fp32BatchNorm) and norm.synchronise and dist.is_initialized()
    joined = synchronised and dist.get_world_size(getattr(norm, "process_group", None)) > 1
    if not norm.training or joined or x.numel() > x.shape[1]:
        return norm(x)
    norm.eval()
    try:
        return norm(x)
    finally:
        norm.train()
