"""AGVM + AdamW (Algorithm 2), on whatever shards it is handed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engine.optim.agvm import AGVMOptimizer
from engine.optim.rule import BATCH, count_adam_step, pieces


class AGVMAdamW(AGVMOptimizer):
    """AdamW whose step on module i is lr * mu[i].

        m[t] = beta1 m[t-1] + (1 - beta1) g[t],   v[t] = beta2 v[t-1] + (1 - beta2) g[t]^2
        r[t] = (m[t] / (1 - beta1^t)) / (sqrt(v[t] / (1 - beta2^t)) + eps)
        w[t+1] = w[t] - lr[t] mu[i] (r[t] + lambda w[t])

    Phi is taken on g[t] / sqrt(v[t] + eps): D^2 = 1 / (v[t] + eps) with the updated v, before bias correction.
    The weight update keeps torch's place of eps. Without a window it is torch.optim.AdamW.
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
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        super().__init__(params, dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay), **agvm)

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        states = count_adam_step(self, params)
        beta1, beta2 = group["betas"]
        for index, (w, g, m, v) in pieces(
            BATCH, params, [p.grad for p in params], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        ):
            # torch's function wants steps as tensors, counts them itself, and wants each its own.
            t = [torch.tensor(float(states[i]["step"] - 1)) for i in index]
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

    def preconditioner(self, group: dict[str, Any], state: dict[str, Tensor], g: Tensor) -> Tensor:
        beta2 = group["betas"][1]
        v = torch.mul(g, g).mul_(1 - beta2)
        if "exp_avg_sq" in state:
            v.add_(state["exp_avg_sq"], alpha=beta2)
        return v.add_(group["eps"]).reciprocal_()
