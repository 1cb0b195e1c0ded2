"""Plain twins of LARS, LAMB and PMD-LAMB, with AGVM or without: one process, whole gradients, no DeepSpeed.

As in `reference.py`, whose blue lines they share; without AGVM, tau lies beyond the run.
"""

from __future__ import annotations

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
        weight_decay: float,
        max_norm: float = 0.0,
        adapt_1d: bool = False,
        tau: int = NEVER,
        alpha: float = 0.97,
        anchor: str = "backbone",
        **agvm,
    ) -> None:
        super().__init__(weights, tau=tau, alpha=alpha, anchor=anchor, **agvm)
        self.lr, self.decay, self.max_norm, self.adapt_1d = lr, weight_decay, max_norm, adapt_1d

    def adapts(self, w: Tensor) -> bool:
        return self.adapt_1d or w.dim() > 1

    def zeros(self) -> Gradients:
        return {i: [torch.zeros_like(w) for w in ws] for i, ws in self.w.items()}


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
        **further,
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
        **further,
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
    def __init__(self, weights: Gradients, lr: float, *, period: int, factor: float, **further) -> None:
        super().__init__(weights, lr, **further)
        self.period, self.factor = period, factor

    def kept(self) -> float:
        return self.factor if self.t > 1 and (self.t - 1) % self.period == 0 else 1.0
