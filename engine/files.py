"""Files and folders: names of files in a work dir, and writing a file completely or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, UserError

# The files of a work dir.
CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
EVAL = "eval.json"
CURVES = "curves.png"
PREDICTIONS = "predictions.png"
CHECKPOINTS = "checkpoints"

PART = ".part"  # the end of the name of a file that is being written


class WriteError(UserError):
    """A file cannot be written, for example because the disk is full."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it at the end. After an error, the old file is still there."""
    aside = path.with_name(path.name + PART)
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def telling(path: Path) -> Iterator[None]:
    """Turn an OSError into a WriteError that names the file."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror}") from None


def write_synced(path: Path, text: str) -> None:
    """Write text and wait until it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Write a JSON file completely or not at all; use `indent` for files that people read."""
    with telling(path), replacing(path) as aside:
        aside.write_text(json.dumps(json_values(value), indent=indent) + "\n")


def json_values(value: Any) -> Any:
    """JSON has no NaN or infinity: write such numbers as text, so that any reader can load the file."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    return value


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {path} cannot be written: {error.strerror}") from None
