"""Batch normalisation with statistics in fp32, over one rank or over all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. A model cast to bf16 or fp16 keeps its running statistics in that type, where
an update with momentum 0.1 soon rounds to nothing. `Fp32BatchNorm` solves both: weights may be in half precision, but
sums and running statistics stay in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class _SyncedNormalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps), with mean and var over all ranks.

    Let D = sum dy and P = sum dy * y over the n values of a channel on all ranks. Then
    dx = (dy - D / n - y * P / n) / sqrt(var + eps).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, group: Any) -> tuple[torch.Tensor, ...]:
        axes = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1]
        # Each rank sums around its own mean; the parallel-variance rule joins the sums. E[x^2] - E[x]^2 would cancel.
        local_mean = x.mean(axes)
        local_m2 = (x - _per_channel(local_mean, x)).square().sum(axes)
        packed = torch.cat([x.new_tensor([float(count)]), local_mean * count])
        dist.all_reduce(packed, group=group)
        total, mean = packed[0], packed[1:] / packed[0]
        m2 = local_m2 + count * (local_mean - mean).square()
        dist.all_reduce(m2, group=group)
        variance = m2 / total
        inverse_std = torch.rsqrt(variance + eps)
        y = (x - _per_channel(mean, x)) * _per_channel(inverse_std, x)
        ctx.save_for_backward(y, inverse_std, total)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, total)
        return y, mean, variance, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        y, inverse_std, total = ctx.saved_tensors
        axes = [0, *range(2, y.dim())]
        sums = torch.stack([dy.sum(axes), (dy * y).sum(axes)])
        dist.all_reduce(sums, group=ctx.group)
        sums = sums / total
        dx = (dy - _per_channel(sums[0], y) - y * _per_channel(sums[1], y)) * _per_channel(inverse_std, y)
        return dx, None, None


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


class Fp32BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Drop-in for BatchNorm1d/2d/3d with the same parameters and buffers. `synchronise`: statistics over all ranks."""

    synchronise = False
    process_group: Any = None

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch norm takes (N, C, ...), got {x.dim()} dimensions")

    def _apply(self, fn: Any, recurse: bool = True) -> Fp32BatchNorm:
        # `.bfloat16()` on the model ends up here: the buffers follow the device but stay fp32.
        super()._apply(fn, recurse)
        self.keep_statistics_fp32()
        return self

    def keep_statistics_fp32(self) -> None:
        for name in ("running_mean", "running_var"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self._forward_fp32(x)

    def _forward_fp32(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        weight = self.weight.float() if self.weight is not None else None
        bias = self.bias.float() if self.bias is not None else None
        use_batch = self.training or self.running_mean is None
        world = dist.get_world_size(self.process_group) if self.synchronise and dist.is_initialized() else 1
        momentum = self.momentum if self.momentum is not None else 0.0
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        # As in torch's SyncBatchNorm, ranks never join in evaluation, where they see different numbers of images.
        if not self.training or world == 1:
            y = nn.functional.batch_norm(
                x.float(), self.running_mean, self.running_var, weight, bias, use_batch, momentum, self.eps
            )
            return y.to(x.dtype)
        y, mean, variance, total = _SyncedNormalise.apply(x.float(), self.eps, self.process_group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * (total / (total - 1)), momentum)
        if weight is not None:
            y = y * _per_channel(weight, y)
        if bias is not None:
            y = y + _per_channel(bias, y)
        return y.to(x.dtype)


class Fp32BatchNormAct(Fp32BatchNorm):
    """The same for timm's BatchNormAct2d, which applies dropout and an activation after the norm."""

    act: nn.Module
    drop: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


def convert_batch_norm(model: nn.Module, *, synchronise: bool, process_group: Any = None) -> int:
    """Turn every batch norm of the model into an Fp32BatchNorm in place, and return how many there were.

    Only the class of each layer changes. The object stays, so parameter names and references to it stay valid.
    """
    norms = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not isinstance(m, nn.modules.instancenorm._InstanceNorm)
    ]
    for module in norms:
        # A layer that is synchronised already stays so.
        already = isinstance(module, nn.SyncBatchNorm) or (isinstance(module, Fp32BatchNorm) and module.synchronise)
        module.__class__ = _replacement(type(module))
        assert isinstance(module, Fp32BatchNorm)
        module.synchronise = synchronise or already
        if synchronise:
            module.process_group = process_group
        module.keep_statistics_fp32()
    return len(norms)


def has_sync_bn(model: nn.Module) -> bool:
    """Whether the model asks for statistics over all ranks in its own config (`norm_cfg` SyncBN)."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _replacement(kind: type) -> type[Fp32BatchNorm]:
    """The class for a batch norm of this type, which may be a subclass that computes no differently: mmengine's SyncBN
    only checks the number of dimensions in another way."""
    from timm.layers import BatchNormAct2d

    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, Fp32BatchNorm)
    for known in (Fp32BatchNormAct, BatchNormAct2d, *plain):
        if issubclass(kind, known) and kind.forward is known.forward:
            return Fp32BatchNorm if known in plain else Fp32BatchNormAct
    raise ValueError(
        f"{kind.__name__} is a batch norm of its own kind, which can be neither synchronised over ranks nor kept in "
        "fp32: use plain BatchNorm layers"
    )


def keep_statistics(model: nn.Module) -> None:
    """mmdet's `norm_eval`: batch norm uses its running statistics while the model trains, and does not update them."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
