"""Plain references of LARS, LAMB and PMD-LAMB, with or without AGVM: in one process, without DeepSpeed.

AGVM is that of `reference.py`; without it, tau is longer than the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.optim.reference import Gradients, Twin, flat, mean

NEVER = 10**9


class LayerwiseTwin(Twin):
    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        adapt_1d: bool = False,
        tau: int = NEVER,
        alpha: float = 0.97,
        anchor: str = "backbone",
        **further: Any,
    ) -> None:
        super().__init__(weights, lr, tau=tau, alpha=alpha, anchor=anchor, **further)
        self.adapt_1d = adapt_1d

    def adapts(self, w: Tensor) -> bool:
        return self.adapt_1d or w.dim() > 1


class ReferenceLARS(LayerwiseTwin):
    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        norm: str = "of_sum",
        weight_decay: float = 0.0,
        **further: Any,
    ) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay, **further)
        self.beta, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.coefficient, self.eps, self.norm = trust_coefficient, eps, norm
        self.m = self.zeros()

    @torch.no_grad()
    def step(self, u: list[Gradients]) -> None:
        self.t += 1
        g, u = mean(u, self.max_norm)
        self.modulate(u, {i: torch.ones_like(flat(w)) for i, w in self.w.items()})
        for i in self.w:
            for w, m, x in zip(self.w[i], self.m[i], g[i]):
                below = (x + self.decay * w).norm() if self.norm == "of_sum" else x.norm() + self.decay * w.norm()
                adapts = self.adapts(w) and w.norm() > 0 and x.norm() > 0
                s = self.coefficient * w.norm() / (below + self.eps) if adapts else 1.0
                step = s * (x + self.decay * w)
                m.copy_(self.beta * m + (1 - self.dampening) * step)
                w -= self.lr * self.mu[i] * (step + self.beta * m if self.nesterov else m)


class ReferenceLAMB(LayerwiseTwin):
    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clamp: tuple[float, float] | None = None,
        **further: Any,
    ) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay, **further)
        self.betas, self.eps, self.clamp = betas, eps, clamp
        self.m, self.v = self.zeros(), self.zeros()
        self.c1 = self.c2 = 0.0

    def kept(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, u: list[Gradients]) -> None:
        self.t += 1
        (beta1, beta2), kept = self.betas, self.kept()
        g, u = mean(u, self.max_norm)
        self.c1, self.c2 = beta1 * kept * self.c1 + 1 - beta1, beta2 * kept * self.c2 + 1 - beta2
        for i in self.w:
            for m, v, x in zip(self.m[i], self.v[i], g[i]):
                m.copy_(beta1 * kept * m + (1 - beta1) * x)
                v.copy_(beta2 * kept * v + (1 - beta2) * x * x)
        self.modulate(u, {i: 1 / (flat(self.v[i]) + self.eps).sqrt() for i in self.w})
        for i in self.w:
            for w, m, v in zip(self.w[i], self.m[i], self.v[i]):
                step = (m / self.c1) / ((v / self.c2).sqrt() + self.eps) + self.decay * w
                s = w.norm() / step.norm() if self.adapts(w) and w.norm() > 0 and step.norm() > 0 else torch.ones(())
                if self.clamp is not None and self.adapts(w):
                    s = s.clamp(*self.clamp)
                w -= self.lr * self.mu[i] * s * step


class ReferencePMDLAMB(ReferenceLAMB):
    def __init__(self, weights: Gradients, lr: float, *, period: int, factor: float, **further: Any) -> None:
        super().__init__(weights, lr, **further)
        self.period, self.factor = period, factor

    def kept(self) -> float:
        return self.factor if self.t > 1 and (self.t - 1) % self.period == 0 else 1.0
