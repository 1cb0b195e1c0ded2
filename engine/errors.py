"""Errors that a user can act on: one sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was given, what is allowed, what to do. Launch scripts print it and exit with code 2."""


class ConfigError(UserError):
    """The JSON, or an override, cannot be used as it stands."""


class DataError(UserError):
    """A data set, annotation or image cannot be used."""


class CheckpointError(UserError):
    """A checkpoint cannot be found, read or used."""


class SaveError(UserError):
    """A checkpoint could not be written. Those that were there before still are."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
