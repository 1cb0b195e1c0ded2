"""CARAFE: upsampling by content-aware kernels.

Each output pixel lies in one input pixel. It is a weighted sum over the k x k neighbourhood of that input pixel. The
weights are the k * k mask channels of its group at the output pixel:

    out[n, c, y, x] = sum_ij mask[n, g(c), i, j, y, x] * input[n, c, y // s + i - k // 2, x // s + j - k // 2]

The code handles one tap of the kernel at a time, so it needs the memory of one output and not k * k times as much.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from models.mmcv_kernels.precision import widen

__all__ = ["carafe_backward", "carafe_forward", "carafe_naive_backward", "carafe_naive_forward"]


def carafe_naive_forward(
    features: Tensor, masks: Tensor, output: Tensor, *, kernel_size: int, group_size: int, scale_factor: int
) -> None:
    features, masks = widen(features, masks)
    total = features.new_zeros(output.shape)
    cells = _cells(total, group_size, scale_factor)
    padded = F.pad(features, [kernel_size // 2] * 4)
    for _, pixels, mask in _taps(padded, masks, kernel_size, group_size, scale_factor):
        cells += pixels * mask
    output.copy_(total)


def carafe_naive_backward(
    grad_output: Tensor,
    features: Tensor,
    masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    *,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    grad_output, features, masks = widen(grad_output, features, masks)
    grad = _cells(grad_output, group_size, scale_factor)
    border = kernel_size // 2
    padded = F.pad(features, [border] * 4)
    total, total_masks = padded.new_zeros(padded.shape), masks.new_zeros(masks.shape)
    taps = _taps(padded, masks, kernel_size, group_size, scale_factor)
    into = _taps(total, total_masks, kernel_size, group_size, scale_factor)
    for (_, pixels, mask), (window, _, mask_out) in zip(taps, into):
        window += (grad * mask).sum((4, 6)).flatten(1, 2)
        mask_out += (grad * pixels).sum(2, keepdim=True)
    height, width = features.shape[2:]
    grad_input.copy_(total[:, :, border : border + height, border : border + width])
    grad_masks.copy_(total_masks)


def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    **sizes: int,
) -> None:
    carafe_naive_forward(features, masks, output, **sizes)
    rfeatures.copy_(features)  # mmcv passes only this to the backward pass; the other r* are scratch space


def carafe_backward(
    grad_output: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rgrad_output: Tensor,
    rgrad_input_hs: Tensor,
    rgrad_input: Tensor,
    rgrad_masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    **sizes: int,
) -> None:
    carafe_naive_backward(grad_output, rfeatures, masks, grad_input, grad_masks, **sizes)


def _cells(output: Tensor, groups: int, scale: int) -> Tensor:
    """A view of an upsampled map as (n, group, channel of the group, y, scale, x, scale)."""
    return output.unflatten(3, (-1, scale)).unflatten(2, (-1, scale)).unflatten(1, (groups, -1))


def _taps(
    padded: Tensor, masks: Tensor, kernel: int, groups: int, scale: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each tap: the window of the padded input, then this window and its mask, both shaped like `_cells`."""
    masks = _cells(masks, groups, scale)
    height, width = masks.shape[3], masks.shape[5]
    for tap in range(kernel * kernel):
        y, x = divmod(tap, kernel)
        window = padded[:, :, y : y + height, x : x + width]
        pixels = window.unflatten(1, (groups, -1))[:, :, :, :, None, :, None]
        yield window, pixels, masks[:, :, tap : tap + 1]
