"""Read JSON that nobody vouches for: limits on depth, size, numbers and text, so that all later code can rely on them.

A value from another source (a dictionary inside a weight file) goes through `plain`, which copies it under the same
limits: such a dictionary can contain itself, or tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from engine.errors import short

MOST_LEVELS = 64
MOST_VALUES = 1_000_000  # the manifest of a billion parameters has some ten thousand
MOST_BYTES = 1 << 28
# torch, numpy and DeepSpeed take whole numbers of 64 bits.
MOST_WHOLE = 2**63 - 1


class JsonError(ValueError):
    """Its text goes on after the name of the file: "is not JSON: ..."."""


def read_json(path: Path) -> Any:
    """The value in a file. JsonError if it is not JSON within the limits, OSError if the file cannot be read."""
    if path.stat().st_size > MOST_BYTES:
        raise JsonError(f"is too long for JSON of ours: it has more than {MOST_BYTES} bytes")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """The value of a text; bytes are UTF-8, with or without a byte-order mark."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise JsonError("is not JSON: it is not even text in UTF-8") from None
    try:
        value = json.loads(decoded, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise JsonError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise JsonError(_too_deep()) from None
    return plain(value)


def plain(value: Any, *, most_values: int = MOST_VALUES) -> Any:
    """A copy that consists of dictionaries with text as keys, lists, text, numbers, true, false and null."""
    return _Copier(most_values).copy(value, level=0)


class _Copier:
    def __init__(self, most_values: int) -> None:
        self.values, self.most_values = 0, most_values

    def copy(self, value: Any, *, level: int) -> Any:
        self.values += 1
        if level > MOST_LEVELS:
            raise JsonError(_too_deep())
        if self.values > self.most_values:  # also the end of a dictionary that contains the same one many times over
            raise JsonError(f"holds more than {self.most_values} values")
        if isinstance(value, dict):
            return {self.key(key): self.copy(item, level=level + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copy(item, level=level + 1) for item in value]
        if isinstance(value, str):
            return _text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return _in_range(int(value))
        if isinstance(value, float):
            if not math.isfinite(value):
                raise JsonError("holds a number that is not finite: give a finite one")
            return float(value)
        raise JsonError(f"holds a {type(value).__name__}, which no JSON has")

    def key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise JsonError(f"has the key {short(key)}, which is no text")
        return _text(key)


def _text(value: str) -> str:
    if "\0" in value:
        raise JsonError(f"has a NUL character in {short(value)}: remove it")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise JsonError(f"has half of a character (a lone surrogate) in {short(value)}: remove it")
    return str(value)


def _whole(digits: str) -> int:
    # Python refuses to convert very long ones with an error of its own.
    if len(digits) > 20:
        raise JsonError(f"holds a whole number of {len(digits.lstrip('-'))} digits: at most {MOST_WHOLE} is possible")
    return _in_range(int(digits))


def _in_range(value: int) -> int:
    if abs(value) > MOST_WHOLE:
        raise JsonError(f"holds a whole number beyond {MOST_WHOLE}")
    return value


def _too_deep() -> str:
    return f"is nested more than {MOST_LEVELS} levels deep"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:place]))
        raise JsonError(f'is ambiguous: the key "{short(twice)}" stands twice in one object, keep one')
    return seen


def _no_constant(word: str) -> Any:
    raise JsonError(f"is refused: {word} is not JSON, and no setting takes it, so give a finite number")
