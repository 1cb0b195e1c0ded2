"""Deformable convolution, with (DCNv2) and without (DCNv1) a mask, on torchvision's kernels.

mmcv and torchvision agree on the offsets (y before x for each tap), on groups and on zeros outside the map. mmcv's
`columns`, `ones` and `im2col_step` are scratch space of its own kernels, which torchvision does not need.

They differ for an offset that is NaN. mmcv treats it as outside the map; torchvision 0.29 reads memory at random and
may end the process. Here the output is NaN at that place, so that it shows in the loss.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  registers torch.ops.torchvision
from torch import Tensor

from models.mmcv_kernels.precision import widen

__all__ = [
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
]


def deform_conv_forward(
    x: Tensor, weight: Tensor, offset: Tensor, output: Tensor, columns: Tensor, ones: Tensor, **layout: Any
) -> None:
    output.copy_(_forward(x, weight, offset, None, None, _layout_v1(layout)))


def deform_conv_backward_input(
    x: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **layout: Any,
) -> None:
    grads = _backward(grad_output, x, weight, offset, None, None, _layout_v1(layout))
    grad_input.copy_(grads[0])
    grad_offset.copy_(grads[2])
    # torchvision computes all gradients at once. mmcv asks for the weight's next and passes the same scratch tensor.
    columns.resize_(weight.shape).copy_(grads[1])


def deform_conv_backward_parameters(
    x: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    columns: Tensor,
    ones: Tensor,
    *,
    scale: float,
    **layout: Any,
) -> None:
    if columns.shape != grad_weight.shape:  # neither the input nor the offset needed a gradient
        columns = _backward(grad_output, x, grad_weight, offset, None, None, _layout_v1(layout))[1]
    grad_weight.add_(columns, alpha=scale)


def modulated_deform_conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    *,
    with_bias: bool,
    **layout: Any,
) -> None:
    offset, mask = (_as_read(taps, output.shape[2:]) for taps in (offset, mask))
    output.copy_(_forward(x, weight, offset, mask, bias if with_bias else None, _layout_v2(layout)))


def modulated_deform_conv_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    *,
    with_bias: bool,
    **layout: Any,
) -> None:
    offset, mask = (_as_read(taps, grad_output.shape[2:]) for taps in (offset, mask))
    grads = _backward(grad_output, x, weight, offset, mask, bias if with_bias else None, _layout_v2(layout))
    outs = (grad_input, grad_weight, grad_offset, grad_mask, grad_bias)
    for out, grad in zip(outs if with_bias else outs[:-1], grads):
        unread = out.numel() - grad.numel()
        out.copy_(F.pad(grad.flatten(1), (0, unread // len(grad))).view(out.shape) if unread else grad)


def _as_read(taps: Tensor, size: torch.Size) -> Tensor:
    """Offsets or masks of a larger map as mmcv reads them: the first values of each image, shaped like the output.

    mmdet's DyHead passes the offsets of one level to the next, so it and its trained weights depend on this.
    """
    if taps.shape[2:] == size:
        return taps
    return taps.flatten(1)[:, : taps.shape[1] * size.numel()].reshape(*taps.shape[:2], *size)


# Stride, padding, dilation (each y before x) and groups, as torchvision takes them, from mmcv's keyword arguments.
_layout_v1 = itemgetter("dH", "dW", "padH", "padW", "dilationH", "dilationW", "group", "deformable_group")
_layout_v2 = itemgetter(
    *("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w", "group", "deformable_group")
)


def _forward(
    x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None, layout: tuple[int, ...]
) -> Tensor:
    operands = _operands(x, weight, offset, mask, bias)
    output = torch.ops.torchvision.deform_conv2d(*operands, *layout, mask is not None)
    return output.masked_fill_(offset.isnan().any(1, keepdim=True), torch.nan)


def _backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    layout: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = _operands(x, weight, offset, mask, bias)
    (grad_output,) = widen(grad_output)
    return torch.ops.torchvision._deform_conv2d_backward(grad_output, *operands, *layout, mask is not None)


def _operands(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    mask = x.new_zeros((len(x), 1)) if mask is None else mask  # torchvision wants a tensor but does not read it
    bias = x.new_zeros(len(weight)) if bias is None else bias
    return widen(x, weight, offset.nan_to_num(0), mask, bias)
