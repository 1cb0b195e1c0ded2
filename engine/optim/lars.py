"""LARS: SGD with momentum. The step of each layer is scaled by the norm of its weights over that of its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.optim.layerwise import LayerwiseOptimizer
from engine.optim.momentum import momentum_options, momentum_tensors
from engine.optim.rule import BATCH, check_not_negative, pieces

NORMS = ("of_sum", "sum_of")


class LARS(LayerwiseOptimizer):
    """For a layer w with gradient g and weight decay lambda,

        s = trust_coefficient |w| / (|g + lambda w| + eps)            `norm` "of_sum", as the AGVM paper writes it
        s = trust_coefficient |w| / (|g| + lambda |w| + eps)          `norm` "sum_of", as You et al. do
        m[t] = momentum m[t-1] + (1 - dampening) s (g + lambda w),    m[0] = 0
        w[t+1] = w[t] - lr m[t]

    and s = 1 for a layer without weights or gradient, and for norms and biases unless `adapt_1d`.
    """

    needs_final_gradient = False
    sums_per_layer = 3

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        norm: str = "of_sum",
        adapt_1d: bool = False,
        **further: Any,
    ) -> None:
        if not isinstance(nesterov, bool):
            raise ValueError(f"nesterov must be true or false, got {nesterov!r}")
        check_not_negative(dampening=dampening, eps=eps)
        if not trust_coefficient > 0:
            raise ValueError(f"trust_coefficient must be > 0, got {trust_coefficient}")
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
        options = momentum_options(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        own = dict(trust_coefficient=trust_coefficient, eps=eps, norm=norm, adapt_1d=adapt_1d)
        super().__init__(params, {**options, **own}, **further)

    def layer_terms(self, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> list[Tensor]:
        return [w * w, w * g, g * g]

    def ratio(self, group: dict[str, Any], sums: Sequence[float], scale: float) -> float:
        decay, (ww, wg, gg) = group["weight_decay"], sums
        gg, wg = gg * scale**2, wg * scale
        if not (ww > 0 and gg > 0 and math.isfinite(ww + gg)):
            return 1.0
        if group["norm"] == "of_sum":
            below = math.sqrt(max(0.0, gg + 2 * decay * wg + decay**2 * ww))
        else:
            below = math.sqrt(gg) + decay * math.sqrt(ww)
        below += group["eps"]
        return group["trust_coefficient"] * math.sqrt(ww) / below if below > 0 else 1.0

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        momentum = group["momentum"]
        cut, ratios = self.by_layer(params, *momentum_tensors(self, group, params))
        for index, (w, g, *m) in pieces(BATCH, *cut):
            step = list(torch._foreach_add(g, w, alpha=group["weight_decay"]))
            torch._foreach_mul_(step, [ratios[i] for i in index])
            if momentum:
                torch._foreach_mul_(m[0], momentum)
                torch._foreach_add_(m[0], step, alpha=1 - group["dampening"])
                if group["nesterov"]:
                    torch._foreach_add_(step, m[0], alpha=momentum)
                else:
                    step = m[0]
            torch._foreach_add_(w, step, alpha=-lr)
