"""The precision the kernels compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(*tensors: Tensor) -> list[Tensor]:
    """Cast all tensors to fp32, or to fp64 if the first one is fp64 (gradient checks)."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [tensor.to(dtype) for tensor in tensors]
