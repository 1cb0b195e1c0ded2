"""The local computations of mmcv's synchronised batch norm. mmcv does the all-reduces between these calls.

Maps are (n, channels, pixels), statistics are fp32 vectors over channels.
"""

from __future__ import annotations

from torch import Tensor

__all__ = [
    "sync_bn_backward_data",
    "sync_bn_backward_param",
    "sync_bn_forward_mean",
    "sync_bn_forward_output",
    "sync_bn_forward_var",
]


def sync_bn_forward_mean(x: Tensor, mean: Tensor) -> None:
    mean.copy_(x.float().mean((0, 2)))


def sync_bn_forward_var(x: Tensor, mean: Tensor, var: Tensor) -> None:
    var.copy_((x.float() - mean[:, None]).square_().mean((0, 2)))


def sync_bn_forward_output(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm: Tensor,
    std: Tensor,
    output: Tensor,
    *,
    eps: float,
    momentum: Tensor,
    group_size: int,
) -> None:
    std.copy_((var + eps).sqrt())
    norm.copy_((x.float() - mean[:, None]) / std[:, None])
    output.copy_(norm if weight is None or bias is None else norm * weight[:, None] + bias[:, None])
    if running_mean is not None and running_var is not None:
        count = x.shape[0] * x.shape[2] * group_size
        unbiased = var * (count / (count - 1)) if count > 1 else var
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(unbiased, momentum)


def sync_bn_backward_param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor, grad_bias: Tensor) -> None:
    grad_weight.copy_((grad_output * norm).sum((0, 2)))
    grad_bias.copy_(grad_output.float().sum((0, 2)))


def sync_bn_backward_data(
    grad_output: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    norm: Tensor,
    std: Tensor,
    grad_input: Tensor,
) -> None:
    count = norm.shape[0] * norm.shape[2]
    common = (grad_weight[:, None] * norm + grad_bias[:, None]) / count
    grad_input.copy_((grad_output - common) * (weight / std)[:, None])
