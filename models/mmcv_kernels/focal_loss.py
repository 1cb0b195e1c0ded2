"""Focal loss on logits (sigmoid) and on probabilities (softmax), and its gradient.

The loss is -alpha_t (1 - p)^gamma log p, where p is the probability of the true label. A row whose target is not one
of the classes is background: for the sigmoid all its classes are negative, for the softmax the row has no loss.
`weight` is empty or has one factor per class, chosen by the target of the row. Background has the factor 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.mmcv_kernels.precision import widen

__all__ = [
    "sigmoid_focal_loss_backward",
    "sigmoid_focal_loss_forward",
    "softmax_focal_loss_backward",
    "softmax_focal_loss_forward",
]


def sigmoid_focal_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor, output: Tensor, *, gamma: float, alpha: float
) -> None:
    z, factor = _signed(x, target, weight, alpha)
    output.copy_(torch.sigmoid(-z).pow_(gamma).mul_(F.logsigmoid(z)).mul_(factor).neg_())


def sigmoid_focal_loss_backward(
    x: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, *, gamma: float, alpha: float
) -> None:
    """d/dz of -(1 - p)^gamma log p is (1 - p)^gamma (gamma p log p - (1 - p)), for p = sigmoid(z)."""
    z, factor = _signed(x, target, weight, alpha)
    wrong = torch.sigmoid(-z)
    slope = F.logsigmoid(z).mul_(1 - wrong).mul_(gamma).sub_(wrong).mul_(wrong.pow_(gamma)).mul_(factor)
    grad_input.copy_(torch.where(_is_target(x, target), slope, -slope))


def _is_target(x: Tensor, target: Tensor) -> Tensor:
    return target[:, None] == torch.arange(x.shape[1], device=x.device)


def _signed(x: Tensor, target: Tensor, weight: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The logit of the true label for each class (x at the target, -x elsewhere), and its factor in the loss."""
    x, weight = widen(x, weight)
    is_target = _is_target(x, target)
    factor = is_target.to(x.dtype).mul_(2 * alpha - 1).add_(1 - alpha)  # alpha on targets, 1 - alpha elsewhere
    if weight.numel():
        factor *= _class_weight(weight, target)[:, None]
    return torch.where(is_target, x, -x), factor


def _class_weight(weight: Tensor, target: Tensor) -> Tensor:
    return F.pad(weight, (0, 1), value=1)[torch.where(target < 0, len(weight), target).clamp(max=len(weight))]


def softmax_focal_loss_forward(
    softmax: Tensor, target: Tensor, weight: Tensor, output: Tensor, *, gamma: float, alpha: float
) -> None:
    p, factor = _true_class(softmax, target, weight, alpha)
    output.copy_((1 - p).pow(gamma) * p.log() * -factor)


def softmax_focal_loss_backward(
    softmax: Tensor, target: Tensor, weight: Tensor, buff: Tensor, grad_input: Tensor, *, gamma: float, alpha: float
) -> None:
    """The gradient with respect to the logits. `buff`, one number per row, is mmcv's scratch space."""
    p, factor = _true_class(softmax, target, weight, alpha)
    # For gamma < 1, (1 - p)^(gamma - 1) is infinite at p = 1. The clamp makes the product with log p = 0 zero.
    wrong = (1 - p).clamp(min=torch.finfo(p.dtype).tiny)
    slope = factor * (gamma * wrong.pow(gamma - 1) * p * p.log() - wrong.pow(gamma))
    grad_input.copy_(slope[:, None] * (_is_target(softmax, target).to(p.dtype) - softmax))


def _true_class(softmax: Tensor, target: Tensor, weight: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    softmax, weight = widen(softmax, weight)
    known = (target >= 0) & (target < softmax.shape[1])
    p = softmax.gather(1, torch.where(known, target, 0)[:, None])[:, 0].clamp(min=torch.finfo(softmax.dtype).tiny)
    factor = alpha * known.to(p.dtype)
    return p, factor * _class_weight(weight, target) if weight.numel() else factor
