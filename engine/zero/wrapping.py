"""Methods of DeepSpeed's objects with ours in front of them, on the instance, and as they were again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Wrapped:
    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, wrapper: Callable) -> None:
        """Let `owner.name(...)` be `wrapper(original, ...)`."""
        original = getattr(owner, name)
        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def undo(self) -> None:
        """Whoever wrapped last unwraps first."""
        for owner, name, original in reversed(self._originals):
            delattr(owner, name) if original is None else setattr(owner, name, original)
        self._originals.clear()
