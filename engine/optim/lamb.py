"""LAMB: AdamW with the step of each layer scaled by the norm of its weights over that of the step. And PMD-LAMB, which
also decays the moments periodically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.optim.adam import adam_options, adam_preconditioner, count_adam_step
from engine.optim.layerwise import LayerwiseOptimizer
from engine.optim.rule import BATCH, pieces


class LAMB(LayerwiseOptimizer):
    """For a layer w with gradient g,

        m[t] = beta1 m[t-1] + (1 - beta1) g[t],   v[t] = beta2 v[t-1] + (1 - beta2) g[t]^2
        r[t] = (m[t] / (1 - beta1^t)) / (sqrt(v[t] / (1 - beta2^t)) + eps)
        s = |w[t]| / |r[t] + lambda w[t]|,        within `clamp` if given
        w[t+1] = w[t] - lr s (r[t] + lambda w[t])

    and s = 1 for a layer without weights or step, and for norms and biases unless `adapt_1d`.
    """

    sums_per_layer = 2

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        clamp: tuple[float, float] | None = None,
        adapt_1d: bool = False,
        **further: Any,
    ) -> None:
        if clamp is not None and (len(clamp) != 2 or not 0 <= clamp[0] <= clamp[1]):
            raise ValueError(f"clamp must be (low, high) with 0 <= low <= high, or None, got {clamp}")
        options = adam_options(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        own = dict(adapt_1d=adapt_1d, clamp=None if clamp is None else tuple(clamp))
        super().__init__(params, {**options, **own}, **further)

    def kept(self, t: int) -> float:
        """The factor on both moments before step t (counted from 1) multiplies them by the betas."""
        return 1.0

    def weights(self, betas: tuple[float, float], t: int) -> tuple[float, float]:
        """The sums of the weights that all gradients have in m[t] and v[t]: bias correction divides by them."""
        return 1 - betas[0] ** t, 1 - betas[1] ** t

    def layer_terms(self, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> list[Tensor]:
        m, v = (
            state[key].to(torch.float32, copy=True) if key in state else torch.zeros_like(g)
            for key in ("exp_avg", "exp_avg_sq")
        )
        step = self._advance(group, [int(state.get("step", 0)) + 1], [w], [g], [m], [v])[0]
        return [w * w, step * step]

    def _advance(
        self, group: dict[str, Any], t: list[int], w: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Update the moments to step t, in place, and return r + lambda w."""
        beta1, beta2 = group["betas"]
        kept, (first, second) = [self.kept(x) for x in t], zip(*(self.weights(group["betas"], x) for x in t))
        torch._foreach_mul_(m, [beta1 * x for x in kept])
        torch._foreach_add_(m, g, alpha=1 - beta1)
        torch._foreach_mul_(v, [beta2 * x for x in kept])
        torch._foreach_addcmul_(v, g, g, value=1 - beta2)
        below = torch._foreach_sqrt(v)
        torch._foreach_div_(below, [math.sqrt(x) for x in second])
        torch._foreach_add_(below, group["eps"])
        torch._foreach_mul_(below, list(first))
        step = torch._foreach_div(m, below)
        torch._foreach_add_(step, w, alpha=group["weight_decay"])
        return step

    def ratio(self, group: dict[str, Any], sums: Sequence[float], scale: float) -> float:
        weights, step = sums
        if not (weights > 0 and step > 0 and math.isfinite(weights + step)):
            return 1.0
        ratio = math.sqrt(weights / step)
        return ratio if group["clamp"] is None else min(max(ratio, group["clamp"][0]), group["clamp"][1])

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        counts, tensors = count_adam_step(self, params)
        steps = [count for count, p in zip(counts, params) for _ in self.segments_of(p)]
        cut, ratios = self.by_layer(params, *tensors)
        for index, (w, g, m, v) in pieces(BATCH, *cut):
            step = self._advance(group, [steps[i] for i in index], w, g, m, v)
            torch._foreach_mul_(step, [ratios[i] for i in index])
            torch._foreach_add_(w, step, alpha=-lr)

    def preconditioner(self, group: dict[str, Any], state: dict[str, Any], g: Tensor) -> Tensor:
        """D^2 for AGVM, as in AdamW."""
        return adam_preconditioner(group, state, g, self.kept(int(state.get("step", 0)) + 1))


class PMDLAMB(LAMB):
    """LAMB with periodic decay of its moments: every `period` steps, m and v are multiplied by `factor`.

    The paper names the method (Wang et al. 2020) but not its rule, and we found no source that has it. So this is our
    reading: after each `period` steps, before the next gradient is added,

        m <- factor m,   v <- factor v

    and bias correction divides by the total weight that the gradients then have in the moments. This is
    c[t] = beta kept[t] c[t-1] + 1 - beta with kept[t] = `factor` at those steps and 1 at others; without decay it is
    1 - beta^t. So m and v stay averages of gradients, with less weight on old ones: `factor` 1 is LAMB, 0 starts anew.
    """

    def __init__(self, params: Any, lr: float = 1e-3, *, period: int, factor: float, **further: Any) -> None:
        if isinstance(period, (bool, str)) or int(period) != period or period < 1:
            raise ValueError(f"period must be a whole number >= 1 of optimizer steps, got {period!r}")
        if not 0 <= factor <= 1:
            raise ValueError(f"factor must be in [0, 1], got {factor}")
        self.period, self.factor = int(period), float(factor)
        super().__init__(params, lr, **further)

    def kept(self, t: int) -> float:
        return self.factor if t > 1 and (t - 1) % self.period == 0 else 1.0

    def weights(self, betas: tuple[float, float], t: int) -> tuple[float, float]:
        first, second = (_weight(beta, t, self.period, self.factor) for beta in betas)
        return first, second


@lru_cache(maxsize=64)
def _weight(beta: float, t: int, period: int, factor: float) -> float:
    """c[t], computed period by period."""
    c = 0.0
    for done in range(0, t, period):
        power = beta ** min(period, t - done)
        c = power * factor * c + 1 - power
    return c
