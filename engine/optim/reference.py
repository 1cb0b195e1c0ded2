"""Plain twins of AGVM+SGD and AGVM+AdamW: one process, whole gradients, no DeepSpeed, the algorithms line by line.

The sharded optimizers are tested against these. `step(u)` takes the gradients of all R micro-batches of the batch,
u[j][module] being a list of tensors, one per weight of the module, with j = k N + r for rank r at micro-step k.
"""

from __future__ import annotations

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
    G1, G2 = D * sum(u[0::2]) / len(u[0::2]), D * sum(u[1::2]) / len(u[1::2])
    if G1.norm() == 0 or G2.norm() == 0:
        return None
    return float(1 - G1 @ G2 / (G1.norm() * G2.norm()))


class Twin:
    """What the two algorithms share: the blue lines."""

    def __init__(
        self,
        weights: Gradients,
        *,
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
        self.mu = dict.fromkeys(weights, 1.0)
        self.phi: dict[str, float] = {}
        self.t = 0

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
    """g, and u in the same units: both shrunk alike when |g| exceeds `max_norm`."""
    g = {i: [sum(x[i][k] for x in u) / len(u) for k in range(len(u[0][i]))] for i in u[0]}
    norm = float(torch.cat([flat(x) for x in g.values()]).norm())
    if max_norm and norm > max_norm:
        shrink = lambda x: {i: [y * (max_norm / (norm + 1e-6)) for y in ys] for i, ys in x.items()}  # noqa: E731
        return shrink(g), [shrink(x) for x in u]
    return g, u


class ReferenceSGD(Twin):
    """Algorithm 1, with torch's momentum; `dampening=momentum` is the paper's."""

    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        **agvm,
    ) -> None:
        super().__init__(weights, **agvm)
        self.lr, self.beta, self.dampening, self.decay, self.max_norm = lr, momentum, dampening, weight_decay, max_norm
        self.m = {i: [torch.zeros_like(w) for w in ws] for i, ws in weights.items()}

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
    """Algorithm 2, with torch's place of eps in the weight update."""

    def __init__(
        self,
        weights: Gradients,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float = 0.0,
        **agvm,
    ) -> None:
        super().__init__(weights, **agvm)
        self.lr, self.betas, self.eps, self.decay, self.max_norm = lr, betas, eps, weight_decay, max_norm
        self.m = {i: [torch.zeros_like(w) for w in ws] for i, ws in weights.items()}
        self.v = {i: [torch.zeros_like(w) for w in ws] for i, ws in weights.items()}

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
