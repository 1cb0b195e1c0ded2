"""DeepSpeed's monitors (tensorboard, wandb, comet, csv_monitor): whether they can be used, checked before the data is
read. DeepSpeed 0.19.8 finds out on rank 0 alone, in the middle of its start, while the other ranks wait."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, short

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
_WRITERS = ("tensorboard", "csv_monitor")


def check_monitors(settings: Mapping[str, Any], *, writes: bool) -> None:
    """ConfigError if an enabled monitor is not installed or, on the rank that `writes`, its folder not writable."""
    for block in (*_PACKAGES, "csv_monitor"):
        content = settings.get(block)
        if not isinstance(content, Mapping) or content.get("enabled") is not True:
            continue
        package = _PACKAGES.get(block)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{block}.enabled is true but the package {package} is not installed: "
                f"pip install {package}, or set {block}.enabled to false"
            )
        if writes and block in _WRITERS:
            _check_folder(block, content)


def _check_folder(block: str, content: Mapping[str, Any]) -> None:
    folder = Path(os.path.join(str(content.get("output_path") or ""), str(content.get("job_name") or "")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{block}.output_path: {short(str(folder), 300)} cannot be written: {reason}") from None
