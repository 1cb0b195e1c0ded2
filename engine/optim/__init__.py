"""Optimizers and param groups. Names load on first use, so that importing the package costs nothing."""

from importlib import import_module
from typing import Any

_HOMES = {
    "AGVMAdamW": "engine.optim.agvm_adamw",
    "AGVMSGD": "engine.optim.agvm_sgd",
    "AGVMLAMB": "engine.optim.agvm_layerwise",
    "AGVMLARS": "engine.optim.agvm_layerwise",
    "LAMB": "engine.optim.lamb",
    "LARS": "engine.optim.lars",
    "PMDLAMB": "engine.optim.lamb",
    "AGVMOptimizer": "engine.optim.agvm",
    "Modulator": "engine.optim.agvm",
    "detector_modules": "engine.optim.modules",
    "module_groups": "engine.optim.modules",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
