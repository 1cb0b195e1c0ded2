"""ZeRO-3's own `torch.nn.functional.linear`, for weights that are matrices only.

DeepSpeed 0.19.8 replaces torch's function by one that keeps no gathered weight for backward. Its backward multiplies by
the weight as a matrix, and fails on a vector: GFL's heads take the mean of a distribution that way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def guard_linear() -> None:
    """Call it after DeepSpeed has put its function in place; does nothing where it has not."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = _linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    # Not the function that DeepSpeed has kept: with a second engine in the process, that would be this one.
    return (zero3_linear_wrap if weight.dim() == 2 else torch._C._nn.linear)(input, weight, bias)
