"""Records on disk: one JSON line per optimizer step, and one per evaluation. Reports read only these files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.files import json_values, replacing, telling


class RecordFile:
    """Appends JSON lines. Each line is written before the next one, so a killed run leaves a readable file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with telling(path):
            self._file = path.open("a", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        with telling(self._path):
            self._file.write(json.dumps(json_values(record)) + "\n")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file. A killed or running run may leave an incomplete last line, which is skipped."""
    text = path.read_text() if path.is_file() else ""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    records = []
    for number, line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if (number, line) != lines[-1]:
                raise UserError(f"{path}, line {number} is not JSON ({error.msg}): remove the line") from None
    return records


def cut_records(source: Path, target: Path, *, last_step: int) -> None:
    """Write the records of `source` up to a step to `target` (which may be the same file), completely or not at all.

    A killed run may leave an incomplete line, and lines of steps that will be computed again.
    """
    kept = []
    for line in source.read_text().splitlines() if source.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] <= last_step:
                kept.append(line + "\n")
    with telling(target), replacing(target) as aside:
        aside.write_text("".join(kept))
