"""The training engine. The names in `__all__` are for users; `engine.train.loop.train` runs a config.

Names load on first use, so that `import engine` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
_MODULES = {
    "RunConfig": "engine.config.schema",
    "UserError": "engine.errors",
    "load_config": "engine.recipes.load",
    "parse_config": "engine.recipes.load",
    "load_model": "engine.inference.load",
    "evaluate": "engine.inference.evaluate",
    "infer": "engine.inference.infer",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
