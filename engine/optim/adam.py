"""Shared by the rules with Adam's two moments (AdamW, LAMB): options, state, and the preconditioner for AGVM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.optim.rule import check_not_negative, gradients


def adam_options(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """The options, checked, as defaults of the param groups."""
    check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
    return dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)


def count_adam_step(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor]
) -> tuple[list[int], list[Sequence[Tensor]]]:
    """Count a step of each parameter and create missing moments. Returns the counts, and as aligned lists the
    parameters, their gradients and both moments."""
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states):
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # A Python int: DeepSpeed 0.19.8's universal ZeRO-3 load shares one `step` tensor between all sub-groups,
        # which would then count once for each of them.
        state["step"] = int(state["step"]) + 1
    moments = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq")]
    return [state["step"] for state in states], [params, gradients(params), *moments]


def adam_preconditioner(group: dict[str, Any], state: dict[str, Any], g: Tensor, kept: float = 1.0) -> Tensor:
    """D^2 = 1 / (v[t] + eps) with the updated v, before bias correction; `kept` is a further factor on v[t-1]."""
    beta2 = group["betas"][1]
    v = torch.mul(g, g).mul_(1 - beta2)
    if "exp_avg_sq" in state:
        v.add_(state["exp_avg_sq"], alpha=beta2 * kept)
    return v.add_(group["eps"]).reciprocal_()
