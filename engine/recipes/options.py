"""A recipe's detector options beneath the user's own, so that the user's win one by one and not by their order.

mmengine's merge_from_dict (0.10) takes options in the order of the file, and a dictionary under a key replaces what came
before it: a recipe's whole backbone behind the user's "backbone.with_cp" would silently undo it, and the user's
{"backbone": {"with_cp": true}} behind the recipe's would leave nothing but that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

AUTO = "auto"
ABSENT = object()
_DELETE = "_delete_"  # mmengine's word: this dictionary replaces what it stands for


def lay_under(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's options first and the user's behind them, whose parts of a recipe's dictionary become dotted keys."""
    tree = as_tree(theirs)
    parts = dict(part for key, value in own.items() for part in _spread(key, value, tree))
    parts = {key: value for key, value in parts.items() if value != AUTO or part_at(tree, key) is ABSENT}
    free = {key: value for key, value in theirs.items() if not any(above in parts for above in _path(key))}
    return {**copy.deepcopy(free), **parts}


def as_tree(options: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted options as one nested dictionary, in which a later one stands over those before it."""
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
    """What stands under a dotted key, or ABSENT."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def _spread(key: str, value: Any, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A dictionary of the user's as dotted keys where the recipe has something beside them; one that replaces, whole."""
    if not isinstance(value, dict) or value.get(_DELETE) or not isinstance(part_at(tree, key), dict):
        yield key, value
        return
    for word, below in value.items():
        if word != _DELETE:
            yield from _spread(f"{key}.{word}", below, tree)


def _path(key: str) -> list[str]:
    """The key and everything above it: "a.b" is below "a"."""
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
