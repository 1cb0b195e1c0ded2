"""Multi-scale deformable attention. mmcv calls these on a GPU; on the CPU it uses its own plain-torch version."""

from __future__ import annotations

import torch
from torch import Tensor

from models.mmcv_kernels.precision import widen

__all__ = ["ms_deform_attn_backward", "ms_deform_attn_forward"]


def ms_deform_attn_forward(
    value: Tensor, shapes: Tensor, level_start: Tensor, locations: Tensor, weights: Tensor, *, im2col_step: int
) -> Tensor:
    return _attend(shapes, *widen(value, locations, weights)).to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    shapes: Tensor,
    level_start: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_locations: Tensor,
    grad_weights: Tensor,
    *,
    im2col_step: int,
) -> None:
    *inputs, grad_output = widen(value, locations, weights, grad_output)
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        output = _attend(shapes, *inputs)
    grads = torch.autograd.grad(output, inputs, grad_output)
    for out, grad in zip((grad_value, grad_locations, grad_weights), grads):
        out.copy_(grad)


def _attend(shapes: Tensor, value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    # As a list, because it is iterated over: reading each number from a GPU tensor would synchronise every time.
    return multi_scale_deformable_attn_pytorch(value, shapes.tolist(), locations, weights)
