"""AGVM's modulator, and the base class of the optimizers that use it.

The modulator turns three sums per module into a gradient variance and a factor on the learning rate. The base class
applies the factor in the step; `engine.zero` finds the gradients in DeepSpeed. Nothing here depends on the ZeRO stage,
and an update rule has two short methods (see `agvm_adamw.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.optim.rule import Rule
from engine.zero.window import Attachment

logger = logging.getLogger(__name__)

ESTIMATORS = ("halves", "replicas")
BUCKET_SIZE = 1 << 24  # elements

# If the squared gradient of a half batch is a smaller share of the whole than this, its direction is rounding error and
# the half counts as one without gradient.
NO_GRADIENT = 1e-12


class Modulator:
    """mu, one factor on the learning rate per module, updated every tau optimizer steps.

    With g the gradient of the whole batch and D the rule's element-wise preconditioner, the sums per module i are

        halves      a = sum D^2 g^2,  b = sum D^2 d^2,  c = sum D^2 g d        d = (G1 - G2) / 2
                    cos = (a + (p - q) c - p q b) / sqrt((a + 2 p c + p^2 b) (a - 2 q c + q^2 b))
                    Phi = 1 - cos(D G1, D G2)
        replicas    n = sum D^2 g^2,  S = sum D^2 Q,  S - n                    Q = mean of u[j]^2
                    Phi = 2 (S - n) / (S + (R - 2) n)

    where u[j], j = 0..R-1, are the micro-batch gradients. G1 is the mean over the first n1 = ceil(R / 2) of them and G2
    the mean over the other n2; p = 2 n2 / R and q = 2 n1 / R. Then, with e = `ratio_eps`,

        mu[i] <- alpha mu[i] + (1 - alpha) clip( sqrt((Phi[anchor] + e) / (Phi[i] + e)) ),     mu[anchor] = 1.

    A module without gradient keeps its mu. If the anchor has no gradient, or any sum is not finite, the window is
    discarded: mu and phi stay as they were.
    """

    def __init__(
        self,
        modules: Sequence[str],
        *,
        tau: int = 10,
        alpha: float = 0.97,
        anchor: str = "backbone",
        estimator: str = "halves",
        clip: tuple[float, float] = (0.1, 10.0),
        start_step: int = 0,
        ratio_eps: float = 1e-12,
    ) -> None:
        if int(tau) != tau or tau < 1:
            raise ValueError(f"tau must be a whole number >= 1, got {tau}")
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {alpha}")
        if anchor not in modules:
            raise ValueError(f"anchor must be one of the modules {list(modules)}, got {anchor!r}")
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {ESTIMATORS}, got {estimator!r}")
        if len(clip) != 2 or not 0 < clip[0] <= 1 <= clip[1]:
            raise ValueError(f"clip must be (low, high) with 0 < low <= 1 <= high, got {clip}")
        if isinstance(start_step, str) or int(start_step) != start_step or start_step < 0:
            raise ValueError(f"start_step must be a whole number >= 0 of optimizer steps, got {start_step!r}")
        if not ratio_eps >= 0:
            raise ValueError(f"ratio_eps must be >= 0, got {ratio_eps}")
        self.tau, self.alpha, self.anchor, self.estimator = int(tau), alpha, anchor, estimator
        self.clip, self.start_step, self.ratio_eps = tuple(clip), int(start_step), ratio_eps
        self.mu: dict[str, float] = dict.fromkeys(modules, 1.0)
        self.phi: dict[str, float] = {}
        self.windows = self.discarded = 0
        self.last_window: int | None = None
        self.paused = False  # set during SAM's first pass, whose gradients are not those of the step

    def is_window(self, step: int) -> bool:
        """Whether this optimizer step (counted from 1) measures the gradient variance."""
        return step > self.start_step and step % self.tau == 0 and not self.paused

    def variance(self, sums: Sequence[float], micro_batches: int) -> float | None:
        """Phi of one module from its three all-reduced sums, or None if it has no gradient."""
        R = micro_batches
        if self.estimator == "replicas":
            n, S, gap = sums
            return None if S <= 0 else max(0.0, 2 * gap / (S + (R - 2) * n))
        a, b, c = sums
        n1, n2 = (R + 1) // 2, R // 2
        p, q = 2 * n2 / R, 2 * n1 / R
        first, second = a + 2 * p * c + p * p * b, a - 2 * q * c + q * q * b  # |D G1|^2 and |D G2|^2
        if min(first, second) <= NO_GRADIENT * (a + b):
            return None
        product, norms = a + (p - q) * c - p * q * b, math.sqrt(first * second)
        if product <= 0:
            return 1 - max(-1.0, product / norms)
        # 1 - cos in a form without cancellation at small angles: |x|^2 |y|^2 - (x y)^2 is 4 (a b - c^2) here.
        return max(0.0, 4 * (a * b - c * c) / (norms * (norms + product)))

    def update(self, step: int, sums: dict[str, Sequence[float]], micro_batches: int) -> bool:
        """Update mu from the sums of one window; False if the window was discarded."""
        if not all(math.isfinite(x) for values in sums.values() for x in values):
            return self.discard("a gradient was not finite")
        phi = {name: self.variance(values, micro_batches) for name, values in sums.items()}
        anchor = phi.get(self.anchor)
        if anchor is None:
            return self.discard(f"the anchor {self.anchor!r} had no gradient")
        self.phi = {name: value for name, value in phi.items() if value is not None}
        low, high = self.clip
        for name, value in self.phi.items():
            if name != self.anchor:
                # If phi and ratio_eps are both 0, mu moves towards the largest factor that clip allows.
                noise = value + self.ratio_eps
                ratio = math.sqrt((anchor + self.ratio_eps) / noise) if noise > 0 else high
                self.mu[name] = self.alpha * self.mu[name] + (1 - self.alpha) * min(high, max(low, ratio))
        self.windows, self.last_window = self.windows + 1, step
        return True

    def discard(self, reason: str) -> bool:
        self.discarded += 1
        logger.info("AGVM window discarded: %s", reason)
        return False

    def state_dict(self) -> dict[str, Any]:
        return {
            "mu": dict(self.mu),
            "phi": dict(self.phi),
            "windows": self.windows,
            "discarded": self.discarded,
            "last_window": self.last_window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing, unknown = set(self.mu) - set(state["mu"]), set(state["mu"]) - set(self.mu)
        if missing or unknown:
            logger.warning(
                "AGVM state: modules %s start at mu = 1, modules %s of the checkpoint are not in this model",
                sorted(missing),
                sorted(unknown),
            )
        self.mu = {name: float(state["mu"].get(name, 1.0)) for name in self.mu}
        self.mu[self.anchor] = 1.0
        self.phi = {name: float(value) for name, value in state["phi"].items() if name in self.mu}
        self.windows, self.discarded = int(state["windows"]), int(state["discarded"])
        self.last_window = state["last_window"]


class AGVMOptimizer(Rule):
    """Base class of the modulated rules. A rule implements `update` and, unless D = 1, `preconditioner`.

    Every param group names its module under `module`. The schedule sets `group["lr"]`; a step uses lr * mu[module]. To
    modulate an existing rule, inherit from the rule and then from this class (see `agvm_layerwise.py`).
    """

    modulated = True

    _attachment: Any = None

    def __init__(self, params: Any, defaults: dict[str, Any], **agvm: Any) -> None:
        super().__init__(params, defaults)
        unnamed = [i for i, group in enumerate(self.param_groups) if not isinstance(group.get("module"), str)]
        if unnamed:
            raise ValueError(
                f"param groups {unnamed} have no name under 'module': "
                "build the groups with engine.optim.module_groups(model, modules)"
            )
        self.modulator = Modulator(list(dict.fromkeys(g["module"] for g in self.param_groups)), **agvm)

    @property
    def phi(self) -> dict[str, float]:
        """The gradient variance of each module, measured in the last window."""
        return dict(self.modulator.phi)

    @property
    def mu(self) -> dict[str, float]:
        """The current factor on the learning rate of each module."""
        return dict(self.modulator.mu)

    @property
    def observer(self) -> Any:
        return None if self._attachment is None else self._attachment.capture

    def attach(self, engine: Any, *, bucket_size: int = BUCKET_SIZE) -> None:
        """Connect to a DeepSpeed engine; call it once, right after `deepspeed.initialize`.

        `bucket_size` (elements) bounds the extra memory of a window: one partition and two buckets per rank, and
        twice that in the first window, which checks itself.
        """
        super().attach(engine)
        Attachment(engine, self, bucket_size=bucket_size)

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()
        super().detach()

    def agvm_state_dict(self) -> dict[str, Any]:
        """mu, phi and the counters, by module name, for training loops that write their own checkpoints."""
        return self.modulator.state_dict()

    def load_agvm_state_dict(self, state: dict[str, Any]) -> None:
        self.modulator.load_state_dict(state)

    def rate(self, group: dict[str, Any]) -> float:
        return super().rate(group) * self.modulator.mu[group["module"]]

    def preconditioner(self, group: dict[str, Any], state: dict[str, Tensor], g: Tensor) -> Tensor | None:
        """D^2 of this step for a slice of a parameter, called before the step; None stands for 1.

        `state` holds the same slice of the parameter's optimizer state (empty before the first step), `g` the fp32
        gradient as the step will see it (unscaled and clipped). Return a new tensor: `sums` overwrites it.
        """
        return None

    @classmethod
    def companion_of(cls, estimator: str) -> str:
        """What a window has beside g: `signed` (d), `squared` (the mean of u^2), or `norms` (no second vector)."""
        if estimator == "halves":
            return "signed"
        return "norms" if cls.preconditioner is AGVMOptimizer.preconditioner else "squared"

    @property
    def companion(self) -> str:
        return self.companion_of(self.modulator.estimator)

    def sums(self, group: dict[str, Any], state: dict[str, Tensor], g: Tensor, d: Tensor | None) -> Tensor:
        """The modulator's three sums over one slice. d is the companion, in the units of g (or of g^2, if squared)."""
        weight = self.preconditioner(group, state, g)
        if d is None:
            # `window.py` adds the norms of the micro-batch gradients. fp64, because S - n is a small difference.
            n = torch.dot(g.double(), g.double())
            return torch.stack([n, n * 0, -n])
        # sum() adds pairwise and stays exact to 1e-8 in fp32; dot() adds one by one and does not.
        weighted = g if weight is None else weight * g
        first = (weighted * g).sum()
        if self.companion == "squared":
            assert weight is not None  # with D = 1 the companion is "norms"
            gap = (weight * d.addcmul(g, g, value=-1)).sum()
            return torch.stack([first, first + gap, gap])
        second = (d * d if weight is None else weight.mul_(d).mul_(d)).sum()
        return torch.stack([first, second, (weighted * d).sum()])
