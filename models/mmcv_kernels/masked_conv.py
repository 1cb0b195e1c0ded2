"""Convolution at selected pixels only: gather their neighbourhoods, and write the results back."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["masked_col2im_forward", "masked_im2col_forward"]


def masked_im2col_forward(
    x: Tensor, rows: Tensor, cols: Tensor, columns: Tensor, *, kernel_h: int, kernel_w: int, pad_h: int, pad_w: int
) -> None:
    padded = F.pad(x[0], (pad_w, pad_w, pad_h, pad_h))
    taps = columns.view(len(padded), kernel_h * kernel_w, len(rows))
    for tap in range(kernel_h * kernel_w):
        taps[:, tap] = padded[:, rows + tap // kernel_w, cols + tap % kernel_w]


def masked_col2im_forward(
    columns: Tensor, rows: Tensor, cols: Tensor, output: Tensor, *, height: int, width: int, channels: int
) -> None:
    output[0][:, rows, cols] = columns
