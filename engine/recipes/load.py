"""From a JSON file and overrides to a validated RunConfig, with the recipe's values filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config.deepspeed_keys import check_names
from engine.config.load import BLOCKS, apply_override, find_config, load_json, validate
from engine.config.origin import Origin, check_carried
from engine.config.schema import RunConfig
from engine.errors import ConfigError
from engine.plain_json import JsonError, plain
from engine.recipes.filling import fill_recipe

MOST_VALUES = 100_000  # of a config: the longest shipped one has a hundred


def load_config(name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the user's file, or of a shipped file by name, after `KEY=VALUE` overrides."""
    path = find_config(name)
    data = load_json(path)
    for override in overrides:
        apply_override(data, override)
    data.setdefault("name", path.stem)
    return parse_config(data, origin=Origin.USER)


def parse_config(data: dict[str, Any], *, origin: Origin = Origin.FILE, source: str = "the data") -> RunConfig:
    """The config of a JSON object, with its recipe filled in.

    Unless `origin` says that the user wrote it, it is checked as one that arrived inside the file `source`.
    """
    try:
        data = plain(data, most_values=MOST_VALUES)
    except JsonError as error:
        raise ConfigError(f"the config of {source} {error}") from None
    check_names(data, BLOCKS)
    config = validate(fill_recipe(data))
    if origin is Origin.USER:
        return config.from_user()
    check_carried(config, source)
    return config


def carried_config(data: Any, source: str, overrides: Sequence[str] = (), *, origin: Origin = Origin.FILE) -> RunConfig:
    """The config that the file or folder `source` carries, after the user's overrides.

    `origin` is USER if the user said that the file's author is trusted (`--trust-config`).
    """
    try:
        data = plain(data, most_values=MOST_VALUES)
    except JsonError as error:
        raise ConfigError(f"the config that {source} carries {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source} carries no config of ours: give --deepspeed_config")
    for override in overrides:
        apply_override(data, override)
    return parse_config(data, origin=origin, source=source)
