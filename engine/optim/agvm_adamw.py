"""AGVM + AdamW (Algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.optim.adam import adam_options, adam_preconditioner, count_adam_step
from engine.optim.agvm import AGVMOptimizer
from engine.optim.fused import can_fuse
from engine.optim.rule import BATCH, pieces


class AGVMAdamW(AGVMOptimizer):
    """AdamW whose step on module i is lr * mu[i].

        m[t] = beta1 m[t-1] + (1 - beta1) g[t],   v[t] = beta2 v[t-1] + (1 - beta2) g[t]^2
        r[t] = (m[t] / (1 - beta1^t)) / (sqrt(v[t] / (1 - beta2^t)) + eps)
        w[t+1] = w[t] - lr[t] mu[i] (r[t] + lambda w[t])

    Phi is measured on g[t] / sqrt(v[t] + eps): D^2 = 1 / (v[t] + eps) with the updated v, before bias correction.
    In the weight update eps stands where torch puts it. Without a window the rule is torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **agvm: Any,
    ) -> None:
        super().__init__(params, adam_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **agvm)

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        steps, tensors = count_adam_step(self, params)
        beta1, beta2 = group["betas"]
        if can_fuse(*tensors):
            w, g, m, v = (list(column) for column in tensors)
            counts = {t: torch.full((), float(t), device=w[0].device) for t in set(steps)}
            torch._fused_adamw_(
                w,
                g,
                m,
                v,
                [],
                [counts[t] for t in steps],  # which the kernel only reads
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            return
        for index, (w, g, m, v) in pieces(BATCH, *tensors):
            # torch's function counts the steps itself, in tensors; no two pieces may share one.
            t = [torch.tensor(float(steps[i] - 1)) for i in index]
            adamw(
                w,
                g,
                m,
                v,
                [],
                t,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=lr,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def preconditioner(self, group: dict[str, Any], state: dict[str, Any], g: Tensor) -> Tensor:
        return adam_preconditioner(group, state, g)
