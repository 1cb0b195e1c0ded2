"""Replacements for mmcv's compiled kernels, written with torchvision and plain torch.

A plain install of mmcv has the Python half of `mmcv.ops` (signatures, autograd functions, registry entries) but not
`mmcv._ext`, the compiled half that it calls. `install()` provides a module of that name, so mmcv's own files are used
unchanged. If a compiled `mmcv._ext` exists, nothing is done.

One subject per file. Each kernel has the name, argument order and in-place outputs that `mmcv/ops/*.py` expects.
Half-precision tensors are computed in fp32: torchvision's CPU kernels have no half precision, and mmcv's own bf16
support varies from op to op.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_SUBJECTS = ("attention", "boxes", "carafe", "deform_conv", "focal_loss", "masked_conv", "roi", "sync_bn")
_BUILD = (
    "MMCV_WITH_OPS=1 pip install --force-reinstall --no-deps --no-build-isolation --no-binary onedl-mmcv onedl-mmcv"
)


def install() -> None:
    """Make `mmcv.ops` importable, unless mmcv has compiled ops of its own."""
    if "mmcv._ext" in sys.modules:
        return
    mmcv = importlib.util.find_spec("mmcv")
    # find_spec("mmcv._ext") would import mmcv, and opencv with it, to find out where to look.
    if mmcv is None or importlib.machinery.PathFinder.find_spec("mmcv._ext", mmcv.submodule_search_locations):
        return
    # mmdet binds a placeholder for each op that it fails to import. Kernels installed later do not replace these.
    if "mmcv.ops" not in sys.modules and {"mmdet.models", "mmdet.structures.mask"} & sys.modules.keys():
        raise ImportError("mmdet was imported before models and has no mmcv ops: import models first")
    sys.modules["mmcv._ext"] = _Kernels("mmcv._ext", __doc__)


class _Kernels(ModuleType):
    """Stands in for the compiled `mmcv._ext`. The kernels are imported when the first one is used."""

    def __init__(self, name: str, doc: str | None) -> None:
        super().__init__(name, doc)
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)  # find_spec refuses a module without one

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # inspect, pytest and pickle look at every loaded module and ask for private names. These do not exist here.
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__.update(_load())
        return self.__dict__.get(name) or functools.partial(_not_provided, name)


@functools.cache
def _load() -> dict[str, Callable[..., Any]]:
    modules = [importlib.import_module(f"{__name__}.{subject}") for subject in _SUBJECTS]
    kernels = {name: _without_autocast(getattr(module, name)) for module in modules for name in module.__all__}
    return kernels | dict.fromkeys(("get_compiler_version", "get_compiling_cuda_version"), _nothing_compiled)


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """With autocast, matrix products inside a kernel would run in half precision although its inputs are fp32."""
    import torch

    @functools.wraps(kernel)
    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *args, **kwargs)

    return run


def _nothing_compiled() -> str:
    return "n/a"  # as mmcv's collect_env reports an install without ops


def _not_provided(name: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        f"the mmcv op {name!r} needs mmcv's compiled ops, which this install lacks and models.mmcv_kernels does not "
        f"replace: build mmcv with them on torch < 2.14 by `{_BUILD}`"
    )
