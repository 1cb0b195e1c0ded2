"""From a JSON file and overrides to a validated RunConfig, with the recipe's values filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config.deepspeed_keys import check_names
from engine.config.load import BLOCKS, apply_override, find_config, load_json, validate
from engine.config.schema import RunConfig
from engine.recipes.filling import fill_recipe


def load_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a file, or of a shipped file by name, after `KEY=VALUE` overrides."""
    path = find_config(name)
    data = load_json(path)
    for override in overrides:
        apply_override(data, override)
    data.setdefault("name", path.stem)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> RunConfig:
    """The config of a JSON object, with its recipe filled in."""
    check_names(data, BLOCKS)
    return validate(fill_recipe(data))
