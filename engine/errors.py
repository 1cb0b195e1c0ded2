"""Errors that a user can fix: shown as one sentence, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """Its text says what was given, what is allowed and what to do. Launch scripts print it and exit with code 2."""


class ConfigError(UserError):
    """The JSON or an override is not valid."""


class DataError(UserError):
    """A data set, annotation or image cannot be used."""


class CheckpointError(UserError):
    """A checkpoint cannot be found, read or used."""


class SaveError(UserError):
    """A checkpoint could not be written. Older checkpoints are untouched."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)`, or an empty string if no known word is close."""
    if len(word) > 100:  # nobody mistyped that, and the search would take minutes
        return ""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""


def first_of(words: Sequence[str], most: int) -> str:
    """The first words, separated by commas, and "..." if there are more."""
    return ", ".join(words[:most]) + (", ..." if len(words) > most else "")


def short(value: object, most: int = 80) -> str:
    """A value for a message: text as it stands, all else as Python writes it. A long one is cut."""
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= most else f"{text[: most * 2 // 3]}...{text[-most // 4 :]} ({len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def quoted(value: object) -> str:
    """As `short`, but text is in quotes, so that 3 and '3' look different."""
    return repr(short(value)) if isinstance(value, str) else short(value)


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or the name of its class if the message is empty."""
    return short((str(error).strip().splitlines() or [type(error).__name__])[0], 300)
