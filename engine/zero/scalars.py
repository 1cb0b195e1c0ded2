"""Parameters without dimensions, such as mmdet's `Scale` (FCOS, ATSS, ...), for DeepSpeed.

DeepSpeed 0.19.8 broadcasts parameters as bytes, through a view that a tensor without dimensions does not have. So
such a parameter has shape (1,) during training, which gives the same results, and shape () in files, as mmdet expects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def give_dimension(parameter: Any) -> None:
    if parameter.dim() == 0 and not hasattr(parameter, "ds_id"):
        parameter.data = parameter.data.view(1)
        parameter.was_scalar = True


def give_dimensions(model: nn.Module) -> None:
    for parameter in model.parameters():
        give_dimension(parameter)


def file_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The full shape of a parameter in files, partitioned or not."""
    return () if hasattr(tensor, "was_scalar") else tuple(getattr(tensor, "ds_shape", tensor.shape))


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The full shape of a parameter. Under zero.Init the parameter itself is empty and DeepSpeed notes its shape."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextlib.contextmanager
def scalars_partitioned() -> Iterator[None]:
    """Let zero.Init partition scalar parameters when they are created."""
    from deepspeed.runtime.zero.partition_parameters import Init

    partition = Init._zero_init_param

    def with_dimension(self: Any, parameter: torch.Tensor) -> None:
        give_dimension(parameter)
        partition(self, parameter)

    Init._zero_init_param = with_dimension
    try:
        yield
    finally:
        Init._zero_init_param = partition
