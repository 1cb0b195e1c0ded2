"""AGVM + SGD with momentum (Algorithm 1), on whatever shards it is handed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from engine.optim.agvm import AGVMOptimizer
from engine.optim.rule import BATCH, pieces


class AGVMSGD(AGVMOptimizer):
    """SGD whose step on module i is lr * mu[i].

        m[t] = momentum m[t-1] + (1 - dampening) (g[t] + lambda w[t]),   m[0] = 0
        w[t+1] = w[t] - lr[t] mu[i] m[t]

    With `dampening` 0 (torch's form, the form of the paper's learning rates) it is torch.optim.SGD with mu on its
    learning rate; `dampening=momentum` is Algorithm 1 to the letter. D = 1: phi is taken on g itself, before
    weight decay.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **agvm: Any,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
        super().__init__(
            params,
            dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov),
            **agvm,
        )

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        buffers: list[Tensor] = []
        if group["momentum"]:
            for p in params:
                state = self.state[p]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                buffers.append(state["momentum_buffer"])
        lists = [params, [p.grad for p in params]] + ([buffers] if buffers else [])
        for _, (w, g, *m) in pieces(BATCH, *lists):
            sgd(
                w,
                g,
                m[0] if m else [None] * len(w),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=lr,
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
            )
