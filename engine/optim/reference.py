"""Plain references ("twins") of AGVM+SGD and AGVM+AdamW: the algorithms line by line, in one process, without
DeepSpeed. The sharded optimizers are tested against them.

`step(u)` takes the gradients of all R micro-batches of the batch. u[j][module] is a list of tensors, one per weight of
the module; micro-batch j = k N + r is that of rank r at micro-step k.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

Gradients = dict[str, list[Tensor]]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors]).double()


def variance(u: list[Tensor], D: Tensor, estimator: str) -> float | None:
    """Phi of one module from its micro-batch gradients; None without gradient."""
    if estimator == "replicas":
        R, S = len(u), sum((D * x).square().sum() for x in u) / len(u)
        n = (D * (sum(u) / R)).square().sum()
        return float(2 * (S - n) / (S + (R - 2) * n)) if S > 0 else None
    first, second = u[: (len(u) + 1) // 2], u[(len(u) + 1) // 2 :]
    G1, G2 = D * sum(first) / len(first), D * sum(second) / len(second)
    if G1.norm() == 0 or G2.norm() == 0:
        return None
    return float(1 - G1 @ G2 / (G1.norm() * G2.norm()))


class Twin:
    """Shared by all algorithms: estimate phi, then update mu (the lines printed in blue in the paper)."""

    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        weight_decay: float,
        max_norm: float = 0.0,
        tau: int,
        alpha: float,
        anchor: str,
        estimator: str = "halves",
        clip: tuple[float, float] = (0.1, 10),
        start_step: int = 0,
        ratio_eps: float = 1e-12,
    ) -> None:
        self.w, self.tau, self.alpha, self.anchor, self.estimator = weights, tau, alpha, anchor, estimator
        self.clip, self.start_step, self.e = clip, start_step, ratio_eps
        self.lr, self.decay, self.max_norm = lr, weight_decay, max_norm
        self.mu = dict.fromkeys(weights, 1.0)
        self.phi: dict[str, float] = {}
        self.t = 0

    def zeros(self) -> Gradients:
        return {i: [torch.zeros_like(w) for w in ws] for i, ws in self.w.items()}

    def modulate(self, u: list[Gradients], D: dict[str, Tensor]) -> None:
        if self.t <= self.start_step or self.t % self.tau:
            return
        phi = {i: variance([flat(x[i]) for x in u], D[i], self.estimator) for i in self.w}
        if phi[self.anchor] is None or not all(torch.isfinite(flat(x[i])).all() for x in u for i in x):
            return
        self.phi = {i: x for i, x in phi.items() if x is not None}
        for i in self.phi:
            if i != self.anchor:
                ratio = ((self.phi[self.anchor] + self.e) / (self.phi[i] + self.e)) ** 0.5
                ratio = min(max(ratio, self.clip[0]), self.clip[1])
                self.mu[i] = self.alpha * self.mu[i] + (1 - self.alpha) * ratio


def mean(u: list[Gradients], max_norm: float = 0.0) -> tuple[Gradients, list[Gradients]]:
    """The mean gradient g, and u; both multiplied by the same factor if |g| exceeds `max_norm`."""
    g = {i: [reduce(torch.add, (x[i][k] for x in u)) / len(u) for k in range(len(u[0][i]))] for i in u[0]}
    norm = float(torch.cat([flat(x) for x in g.values()]).norm())
    if max_norm and norm > max_norm:
        factor = max_norm / (norm + 1e-6)
        g, *u = ({i: [y * factor for y in ys] for i, ys in x.items()} for x in (g, *u))
    return g, u


class ReferenceSGD(Twin):
    """Algorithm 1, with torch's momentum; `dampening=momentum` gives the paper's."""

    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        **further: Any,
    ) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay, **further)
        self.beta, self.dampening, self.m = momentum, dampening, self.zeros()

    @torch.no_grad()
    def step(self, u: list[Gradients]) -> None:
        self.t += 1
        g, u = mean(u, self.max_norm)
        self.modulate(u, {i: torch.ones_like(flat(w)) for i, w in self.w.items()})
        for i in self.w:
            for w, m, x in zip(self.w[i], self.m[i], g[i]):
                m.copy_(self.beta * m + (1 - self.dampening) * (x + self.decay * w))
                w -= self.lr * self.mu[i] * m


class ReferenceAdamW(Twin):
    """Algorithm 2, with eps in the weight update where torch puts it."""

    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **further: Any,
    ) -> None:
        super().__init__(weights, lr, weight_decay=weight_decay, **further)
        self.betas, self.eps, self.m, self.v = betas, eps, self.zeros(), self.zeros()

    @torch.no_grad()
    def step(self, u: list[Gradients]) -> None:
        self.t += 1
        beta1, beta2 = self.betas
        g, u = mean(u, self.max_norm)
        for i in self.w:
            for m, v, x in zip(self.m[i], self.v[i], g[i]):
                m.copy_(beta1 * m + (1 - beta1) * x)
                v.copy_(beta2 * v + (1 - beta2) * x * x)
        self.modulate(u, {i: 1 / (flat(self.v[i]) + self.eps).sqrt() for i in self.w})
        for i in self.w:
            for w, m, v in zip(self.w[i], self.m[i], self.v[i]):
                r = (m / (1 - beta1**self.t)) / ((v / (1 - beta2**self.t)).sqrt() + self.eps)
                w -= self.lr * self.mu[i] * (r + self.decay * w)
