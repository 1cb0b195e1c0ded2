"""Errors that a user can act on: one sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was given, what is allowed, what to do. Launch scripts print it and exit with code 2."""


class ConfigError(UserError):
    """The JSON, or an override, cannot be used as it stands."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean "x"?)`, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' (did you mean "{close[0]}"?)' if close else ""
