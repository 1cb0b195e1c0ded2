from __future__ import annotations

from engine.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be found, read or used."""


class SaveError(UserError):
    """A checkpoint could not be written. Those that were there before still are."""
