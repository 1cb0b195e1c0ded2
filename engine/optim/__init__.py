"""Optimizers and param groups. A name is imported when it is first used, so importing the package is fast."""

from importlib import import_module
from typing import Any

_MODULES = {
    "detector_modules": "engine.optim.modules",
    "module_groups": "engine.optim.modules",
    "AGVMOptimizer": "engine.optim.agvm",
    "Modulator": "engine.optim.agvm",
}
__all__ = ["AGVMLAMB", "AGVMLARS", "AGVMSGD", "LAMB", "LARS", "PMDLAMB", "AGVMAdamW", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "engine.optim.registry")), name)
