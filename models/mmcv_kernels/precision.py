"""The precision the kernels compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: fp32, or fp64 where the first one is (gradient checks)."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [tensor.to(dtype) for tensor in tensors]
