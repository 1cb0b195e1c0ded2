"""Batch-norm statistics of all ranks as one: without SyncBN every rank has seen other images."""

from __future__ import annotations

import torch
from torch import nn

from engine import distributed


@torch.no_grad()
def join_statistics(model: nn.Module) -> None:
    """Put the mean over ranks into every running mean and variance, so that all ranks score the model that is saved."""
    buffers = [buffer for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
               for buffer in (module.running_mean, module.running_var) if buffer is not None]
    if not buffers or distributed.world_size() == 1:
        return
    mean = distributed.sum_over_ranks(torch.cat([buffer.flatten().double().cpu() for buffer in buffers]))
    mean /= distributed.world_size()
    for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(values.view_as(buffer))
