"""Dotted keys of the JSON, as used by --set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys below these may contain dots themselves, so the rest of the path is one key.
_WHOLE_BELOW = (["detector", "options"], ["optimizer", "paramwise", "lr_mult"])


def split_key(key: str) -> list[str]:
    """The path of a dotted key: "detector.options.backbone.depth" is the option "backbone.depth"."""
    parts = key.split(".")
    for whole in _WHOLE_BELOW:
        if parts[: len(whole)] == whole and len(parts) > len(whole) + 1:
            return [*whole, ".".join(parts[len(whole) :])]
    return parts


def value_at(data: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value under a dotted key, or `default` if there is none."""
    node: Any = data
    for part in split_key(key):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node
