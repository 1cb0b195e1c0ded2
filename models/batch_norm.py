"""Batch normalisation with statistics in fp32, over one rank or over all ranks, on any device.

torch's SyncBatchNorm refuses CPU tensors. A model cast to bf16 or fp16 keeps its running statistics in that type, where
an update with momentum 0.1 soon rounds to nothing. `Fp32BatchNorm` solves both: weights and maps may be in half
precision, but sums and running statistics stay in fp32. No fp32 copy of a map is kept: torch's kernels take a half
precision map with fp32 weights and statistics, on CPU and CUDA.

Over ranks it sends one message forward and one backward, of a size that does not grow with the number of ranks, and the
host never waits for the device. The autograd function of torch's SyncBatchNorm (2.15) does otherwise: it gathers the
statistics of every rank, and drops those of ranks without values by a mask, which the host reads. So it is not called;
its kernels are, where they exist (CUDA).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class _SyncedBatchNorm(torch.autograd.Function):
    """y = weight * z + bias with z = (x - mean) / sqrt(var + eps), mean and var over all ranks.

    Let D = sum dy and P = sum dy * z over the n values of a channel on all ranks. Then
    dx = weight * (dy - D / n - z * P / n) / sqrt(var + eps). A rank without values takes part with zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, group: Any
    ) -> tuple[torch.Tensor, ...]:
        if not _is_channels_last(x):
            x = x.contiguous()
        count = x.numel() // x.shape[1]
        mean, variance = (v.double() for v in _moments(x, eps))
        # Each rank sums around its own mean in fp32. Sums of squares around zero cancel when they are joined, by the
        # square of mean / deviation: in fp64 there are enough digits for that, and one message carries everything.
        packed = torch.cat([mean * count, (variance + mean.square()) * count, mean.new_full((1,), count)])
        dist.all_reduce(packed, group=group)
        total, channels = packed[-1:], x.shape[1]
        mean = packed[:channels] / total
        variance = (packed[channels:-1] / total - mean.square()).clamp_min_(0).float()
        mean = mean.float()
        y = nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps) if count else x.clone()
        ctx.save_for_backward(x, weight, mean, variance, total)
        ctx.group, ctx.eps = group, eps
        ctx.mark_non_differentiable(mean, variance, total)
        return y, mean, variance, total

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance, total = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last) if _is_channels_last(x) else dy.contiguous()
        scale = torch.ones_like(mean) if weight is None else weight
        if x.numel():
            # The gradients of weight and bias are this rank's P and D.
            _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, scale, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        else:
            dweight, dbias = torch.zeros_like(mean), torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([dbias, dweight])
            dist.all_reduce(sums, group=ctx.group)
            inverse_std = torch.rsqrt(variance + ctx.eps)
            dx = _input_gradient(dy, x, scale, mean, inverse_std, sums, total)
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        return dx, dweight if of_weight else None, dbias if of_bias else None, None, None


def has_sync_kernels(device: torch.device) -> bool:
    """Whether torch has the kernels of its SyncBatchNorm on this device."""
    return device.type == "cuda"


def _moments(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of this rank's values, in fp32."""
    if x.numel() == 0:
        zeros = torch.zeros(x.shape[1], device=x.device)
        return zeros, zeros
    if has_sync_kernels(x.device):
        mean, inverse_std = torch.batch_norm_stats(x, eps)
        return mean, (inverse_std.double().pow(-2) - eps).clamp_min_(0)
    axes = [0, *range(2, x.dim())]
    x = x.float()
    mean = x.mean(axes)
    return mean, (x - _per_channel(mean, x)).square().mean(axes)


def _input_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    inverse_std: torch.Tensor,
    sums: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    sum_dy, sum_dy_z = sums.unbind()
    if x.numel() == 0:
        return torch.zeros_like(x)
    if has_sync_kernels(x.device):
        around_mean = sum_dy_z / inverse_std  # torch's kernel takes sum dy * (x - mean)
        return torch.batch_norm_backward_elemt(
            dy, x, mean, inverse_std, weight, sum_dy, around_mean, total.to(torch.int32)
        )
    # A dy + B x + C, with one number of each for a channel.
    a = weight * inverse_std
    b = -a * inverse_std * sum_dy_z / total.float()
    c = -a * sum_dy / total.float() - b * mean
    dx = torch.addcmul(_per_channel(c, x), dy.float(), _per_channel(a, x))
    return dx.addcmul_(x.float(), _per_channel(b, x)).to(x.dtype)


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


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
        if self.training and self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        # As in torch's SyncBatchNorm, ranks never join in evaluation, where they see different numbers of images.
        if self.training and world > 1:
            y, mean, variance, total = _SyncedBatchNorm.apply(x, weight, bias, self.eps, self.process_group)
            self._update_statistics(mean, variance * (total / (total - 1)))
            return y
        if not self.training or self.momentum is not None or self.running_mean is None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, weight, bias, use_batch, self.momentum or 0.0, self.eps
            )
        # `momentum` None is a mean over all batches. Their number is on the device, and torch wants it from the host.
        assert self.running_var is not None
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        y = nn.functional.batch_norm(x, mean, variance, weight, bias, True, 1.0, self.eps)
        self._update_statistics(mean, variance)
        return y

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            value = value.to(running.dtype)
            if self.momentum is not None:
                running.lerp_(value, self.momentum)
            else:
                assert self.num_batches_tracked is not None
                running.lerp_(value, self.num_batches_tracked.to(running.dtype).reciprocal())


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
