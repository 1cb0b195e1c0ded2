"""mmengine and mmcv run what a config names: closed here, once, for everything that is built in this process.

Seen in mmengine 0.10.12, mmcv 2.3.6 and mmdet 3.5.1:

- `Registry.get` imports a name that is not registered: `type="os.system"` is called with the other keys as arguments.
  A name with a scope imports `SCOPE.registry`, and so does the key `_scope_`.
- The loader behind `init_cfg` unpickles a file completely if it cannot be read as plain tensors, and downloads.
- `batched_nms` and `CameraMotionCompensation` call `eval` on a text of the config.

Import paths work inside `import_paths_allowed()`, for a config that the user wrote. The others stay closed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_SCOPES = ("mmdet", "mmengine", "mmcv")
_allowed: ContextVar[bool] = ContextVar("import paths in registries", default=False)


@contextlib.contextmanager
def import_paths_allowed() -> Iterator[None]:
    """Let registries import what a config names, as mmengine does. Only for a config that the user wrote."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_registered_form(key: Any) -> bool:
    """Whether a `type` is a plain name, or one of a scope that is always there."""
    if not isinstance(key, str):
        return False
    scope, _, name = key.rpartition(".")
    return name.isidentifier() and (not scope or scope in _SCOPES)


@functools.cache
def close_registries() -> None:
    """Called once, when mmdet has been imported."""
    import mmengine.registry.registry as registry
    import mmengine.runner.checkpoint as checkpoint
    from mmdet.models.task_modules.tracking import camera_motion_compensation

    by_name, by_path = registry.Registry.get, registry.get_object_from_string
    switch = registry.Registry.switch_scope_and_registry

    def get(self: Any, key: Any) -> Any:
        if not _allowed.get() and not is_registered_form(key):
            raise KeyError(f"{key!r:.80} is not the name of a registered class")
        return by_name(self, key)

    def get_object_from_string(name: str) -> Any:
        return by_path(name) if _allowed.get() else None

    @contextlib.contextmanager
    def switch_scope_and_registry(self: Any, scope: Any) -> Iterator[Any]:
        if scope is not None and scope not in _SCOPES and not _allowed.get():
            raise KeyError(f"_scope_ {scope!r:.80} is none of {', '.join(_SCOPES)}")
        with switch(self, scope) as found:
            yield found

    registry.Registry.get = get
    registry.get_object_from_string = get_object_from_string
    registry.Registry.switch_scope_and_registry = switch_scope_and_registry
    checkpoint._safe_torch_load = _plain_tensors
    for scheme in checkpoint.CheckpointLoader._schemes:
        if scheme:
            checkpoint.CheckpointLoader._schemes[scheme] = _no_download
    # A module's own `eval` comes before Python's.
    nms: Any = sys.modules["mmcv.ops.nms"]
    operators = {name: getattr(nms, name) for name in ("nms", "soft_nms", "nms_match", "nms_rotated", "nms_quadri")}
    nms.eval = functools.partial(_by_name, "nms.type", operators)
    modes = {f"cv2.MOTION_{name}": number for number, name in enumerate(_MOTIONS)}
    camera_motion_compensation.eval = functools.partial(_by_name, "warp_mode", modes)


_MOTIONS = ("TRANSLATION", "EUCLIDEAN", "AFFINE", "HOMOGRAPHY")  # in cv2's order


def _by_name(what: str, known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise ValueError(f"{what} {name!r:.80} is none of {', '.join(known)}")
    return known[name]


def _plain_tensors(file: Any, map_location: Any = None, weights_only: Any = None) -> Any:
    import torch  # here: this module is imported before torch is needed

    return torch.load(file, map_location=map_location, weights_only=True)


def _no_download(filename: str, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(f"nothing is downloaded, and {filename!r:.80} is no file: give weights as detector.load_from")
