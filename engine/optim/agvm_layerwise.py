"""AGVM on top of LARS and LAMB: the modulator's mu on the learning rate, the layers' ratios inside the step.

mu belongs to a module and the ratio to a layer, and neither enters the other: norms are of weights and of a step before
its learning rate, phi of gradients.
"""

from __future__ import annotations

from engine.optim.agvm import AGVMOptimizer
from engine.optim.lamb import LAMB
from engine.optim.lars import LARS


class AGVMLARS(LARS, AGVMOptimizer):
    """LARS whose step on module i is lr * mu[i]; D = 1 as of SGD: phi is taken on g itself."""


class AGVMLAMB(LAMB, AGVMOptimizer):
    """LAMB whose step on module i is lr * mu[i]; phi is taken on g[t] / sqrt(v[t] + eps), as of AdamW."""
