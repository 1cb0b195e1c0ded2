"""AGVM on top of LARS and LAMB: mu multiplies the learning rate of a module, the ratio the step of a layer.

Neither influences the other: the ratio is computed from weights and steps before the learning rate, phi from gradients.
"""

from __future__ import annotations

from engine.optim.agvm import AGVMOptimizer
from engine.optim.lamb import LAMB
from engine.optim.lars import LARS


class AGVMLARS(LARS, AGVMOptimizer):
    """LARS whose step on module i is lr * mu[i]; D = 1 as for SGD: phi is measured on g itself."""


class AGVMLAMB(LAMB, AGVMOptimizer):
    """LAMB whose step on module i is lr * mu[i]; phi is measured on g[t] / sqrt(v[t] + eps), as for AdamW."""
