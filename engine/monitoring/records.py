"""Records on disk: one JSON line per optimizer step, one per evaluation. Reports read these files and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config.errors import UserError


class RecordError(UserError):
    """A record cannot be written, as on a full disk."""


class RecordFile:
    """Appends JSON lines; every line is whole on disk before the next, so a killed run leaves a readable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _writing(path):
            self._file = path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        with _writing(self._path):
            self._file.write(json.dumps(_plain(record)) + "\n")

    def close(self) -> None:
        self._file.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN: a loss that is not a number is written as text, so that any reader can load the file."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without the half line that a killed or a running run may leave at its end."""
    lines = (
        [(number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
        if path.is_file()
        else []
    )
    records = []
    for number, line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if (number, line) != lines[-1]:
                raise UserError(f"{path}, line {number} is not JSON ({error.msg}): remove the line") from None
    return records


def cut_records(source: Path, target: Path, *, last_step: int) -> None:
    """The records of `source` up to a step, as `target` (which may be the same file): whole or not at all.

    A run that was killed may leave half a line, and lines of steps that will be computed again.
    """
    kept = []
    for line in source.read_text().splitlines() if source.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
    aside = target.with_name(target.name + ".part")
    with _writing(target):
        aside.write_text("".join(kept))
        aside.replace(target)


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Write a whole file or none; `indent` for what people read."""
    aside = path.with_name(path.name + ".part")
    with _writing(path):
        aside.write_text(json.dumps(_plain(value), indent=indent) + "\n")
        aside.replace(path)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}") from None
