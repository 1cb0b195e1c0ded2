"""When an update may use torch's fused kernels: one pass over memory, without temporaries."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices


def can_fuse(*tensors: Sequence[Tensor]) -> bool:
    """Whether aligned lists (weights, gradients, moments) are of one type, contiguous, and on a device with kernels."""
    weights = tensors[0]
    if not weights or weights[0].device.type not in _get_fused_kernels_supported_devices():
        return False
    dtype, device = weights[0].dtype, weights[0].device
    return dtype.is_floating_point and all(
        t.dtype == dtype and t.device == device and t.is_contiguous() for column in tensors for t in column
    )
