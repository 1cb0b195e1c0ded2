"""Batch-norm statistics over ranks. Without SyncBN they differ, because every rank sees other images."""

from __future__ import annotations

import torch
from torch import nn

from engine import distributed


def _running(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, buffer in (("running_mean", module.running_mean), ("running_var", module.running_var))
        if buffer is not None
    }


@torch.no_grad()
def join_statistics(model: nn.Module) -> None:
    """Replace every running mean and variance by its mean over ranks, so that all ranks evaluate the same model."""
    restore_statistics(model, joined_statistics(model))


@torch.no_grad()
def joined_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running means and variances as means over ranks, in fp64 on the CPU. Empty with one rank."""
    buffers = _running(model)
    if not buffers or distributed.world_size() == 1:
        return {}
    mean = distributed.sum_over_ranks(torch.cat([buffer.flatten().double().cpu() for buffer in buffers.values()]))
    mean /= distributed.world_size()
    parts = mean.split([buffer.numel() for buffer in buffers.values()])
    return {name: values.view_as(buffer) for (name, buffer), values in zip(buffers.items(), parts)}


def local_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's running means and variances by name. Empty with one rank: the model has them already."""
    return {} if distributed.world_size() == 1 else dict(_running(model))


@torch.no_grad()
def restore_statistics(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Restore what `local_statistics` returned."""
    for name, buffer in _running(model).items():
        if name in saved:
            buffer.copy_(saved[name])
