"""Wrap methods of an object, on the instance, and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, wrapper: Callable) -> None:
        """Make `owner.name(...)` call `wrapper(original, ...)`."""
        original = getattr(owner, name)
        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def undo(self) -> None:
        """Restore the originals, the last wrapped first."""
        for owner, name, original in reversed(self._originals):
            delattr(owner, name) if original is None else setattr(owner, name, original)
        self._originals.clear()
