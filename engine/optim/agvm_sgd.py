"""AGVM + SGD with momentum (Algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from engine.optim.agvm import AGVMOptimizer
from engine.optim.fused import can_fuse
from engine.optim.momentum import momentum_options, momentum_tensors
from engine.optim.rule import BATCH, pieces


class AGVMSGD(AGVMOptimizer):
    """SGD whose step on module i is lr * mu[i].

        m[t] = momentum m[t-1] + (1 - dampening) (g[t] + lambda w[t]),   m[0] = 0
        w[t+1] = w[t] - lr[t] mu[i] m[t]

    With `dampening` 0 (torch's form, for which the paper's learning rates are meant) it is torch.optim.SGD with mu on
    its learning rate; `dampening=momentum` is exactly Algorithm 1. D = 1: phi is measured on g itself, before weight
    decay.
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
        options = momentum_options(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, options, **agvm)

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        tensors = momentum_tensors(self, group, params)
        if can_fuse(*tensors):
            torch._fused_sgd_(
                list(tensors[0]),
                list(tensors[1]),
                list(tensors[2]) if group["momentum"] else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=lr,
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,  # buffers begin as zeros
            )
            return
        for _, (w, g, *m) in pieces(BATCH, *tensors):
            sgd(
                w,
                g,
                [*m[0]] if m else [None] * len(w),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=lr,
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
            )
