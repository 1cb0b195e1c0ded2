"""The one way to import mmdet: with our kernels under mmcv.ops, without notices on the screen, our parts registered.

A module that imports mmdet at its top calls `import_mmdet()` first.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator

from models.mmcv_kernels import install
from models.registry_gate import close_registries


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep import-time notices of mmdet and its optional packages off the user's screen."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@functools.cache
def import_mmdet() -> None:
    """Import mmdet with our kernels under mmcv.ops, and register everything that configs may name."""
    install()  # mmdet looks for mmcv.ops when it is imported
    with quiet():
        import mmdet.models  # noqa: F401
        from mmdet.utils import register_all_modules

        register_all_modules(init_default_scope=True)
        import models.registry  # noqa: F401
    close_registries()
