"""Shared by the rules with a momentum buffer (SGD, LARS): options and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.optim.rule import check_not_negative, gradients


def momentum_options(
    *, lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
) -> dict[str, Any]:
    """The options, checked, as defaults of the param groups."""
    check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
    return dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)


def momentum_tensors(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: Sequence[Tensor]
) -> list[Sequence[Tensor]]:
    """Aligned lists: parameters, gradients and, with momentum, the buffers; missing buffers are created."""
    if not group["momentum"]:
        return [params, gradients(params)]
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states):
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return [params, gradients(params), [state["momentum_buffer"] for state in states]]
