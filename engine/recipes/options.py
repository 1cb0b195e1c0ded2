"""Merge a recipe's detector options with the user's, so that each of the user's values wins, whatever the order.

mmengine's merge_from_dict (0.10) applies options in the order of the file, and a dictionary replaces what came before
it. A recipe's whole backbone after the user's "backbone.with_cp" would silently undo it, and the user's
{"backbone": {"with_cp": true}} after the recipe's backbone would leave nothing but with_cp.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

AUTO = "auto"
ABSENT = object()
_DELETE = "_delete_"  # mmengine's mark of a dictionary that replaces the old one instead of being merged


def lay_under(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's options, then the user's. User values inside one of the recipe's dictionaries become dotted keys."""
    tree = as_tree(theirs)
    parts = dict(part for key, value in own.items() for part in _spread(key, value, tree))
    parts = {key: value for key, value in parts.items() if value != AUTO or part_at(tree, key) is ABSENT}
    free = {key: value for key, value in theirs.items() if not any(above in parts for above in _path(key))}
    return {**copy.deepcopy(free), **parts}


def as_tree(options: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted options as one nested dictionary; later options replace earlier ones."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        node = tree
        *parents, last = key.split(".")
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = copy.deepcopy(value)
    return tree


def part_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key, or ABSENT."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def _spread(key: str, value: Any, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A user's dictionary as dotted keys if the recipe has a dictionary there too. With _delete_ it stays one key."""
    if not isinstance(value, dict) or value.get(_DELETE) or not isinstance(part_at(tree, key), dict):
        yield key, value
        return
    for word, below in value.items():
        if word != _DELETE:
            yield from _spread(f"{key}.{word}", below, tree)


def _path(key: str) -> list[str]:
    """The key and all keys above it: "a" and "a.b" for "a.b"."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
