"""Find and read a JSON file, apply overrides, and validate the result as a RunConfig.

`engine.recipes.load` combines these steps and fills in recipes in between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import ds_configs  # a namespace package that holds JSON files only
from engine.config.deepspeed_keys import check_values
from engine.config.keys import split_key
from engine.config.schema import Block, RunConfig, block_of
from engine.errors import ConfigError, nearest, quoted, short
from engine.plain_json import JsonError, parse_json, plain, read_json

BLOCKS = ("name", "recipe", "detector", "data", "optimizer", "schedule", "run")

PAPER = Path("paper")  # folder in ds_configs with a file for every row of the paper's tables


def find_config(name: str) -> Path:
    """The file at a path, or a file of the installed `ds_configs` by name, with or without `.json`."""
    path = _expand(name)
    if _is_file(path):
        return path
    # Only without a folder: a typo in the path of the user's own quickstart.json must not run ours.
    inside = path.relative_to("ds_configs") if path.is_relative_to("ds_configs") else path
    for folder in ds_configs.__path__ if inside.parent in (Path("."), PAPER) else ():
        for candidate in (Path(folder) / inside, Path(folder) / f"{inside}.json"):
            if _is_file(candidate):
                return candidate
    shipped, rows = _shipped("*.json"), _shipped(f"{PAPER}/*.json")
    raise ConfigError(
        f'config "{short(name, 200)}" is neither a file nor one of the shipped ones: {", ".join(shipped)}, or a row of '
        f"the paper's tables such as {rows[0]}{nearest(str(inside.with_suffix('')), (*shipped, *rows))}"
    )


def _shipped(pattern: str) -> list[str]:
    return sorted(
        {
            str(path.relative_to(folder).with_suffix(""))
            for folder in ds_configs.__path__
            for path in Path(folder).glob(pattern)
        }
    )


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, not yet validated."""
    try:
        data = read_json(path)
    except JsonError as error:
        raise ConfigError(f"{path} {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """`a.b=c` sets data["a"]["b"]. c is read as JSON if it is valid JSON, else as text.

    `detector.options.x.y=c` sets the option "x.y".
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f'--set takes KEY=VALUE with a dotted key, such as run.seed=1, got "{short(override)}"')
    try:
        key = plain(key)
        value = parse_json(text) if _is_json(text) else plain(text)
    except JsonError as error:
        raise ConfigError(f"--set {short(override)}: the value {error}") from None
    parts = split_key(key)
    node = data
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:  # a saved config has null for what was not given
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            above = ".".join(parts[: depth + 1])
            raise ConfigError(f'--set {short(override)}: "{short(above)}" is a value and has no keys below it')
    node[parts[-1]] = value


def _is_json(text: str) -> bool:
    """Whether --set means JSON; anything else is text, such as a path."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    except (RecursionError, ValueError):  # too deep, or too many digits: `parse_json` says so
        return True
    return True


def validate(data: dict[str, Any]) -> RunConfig:
    """The typed config of a JSON whose recipe is already filled in."""
    data = dict(data)
    blocks = {key: data.pop(key) for key in BLOCKS if key in data}
    check_values(data)
    try:
        config = RunConfig(**blocks, deepspeed=data)
    except ValidationError as error:
        raise ConfigError(_one_sentence(error)) from None
    return _absolute_paths(config)


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _one_sentence(error: ValidationError) -> str:
    # A misspelt required key is reported as unknown and as missing. "Unknown" is the more helpful message.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    kind, given, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "extra_forbidden":
        *parents, word = [str(part) for part in first["loc"]]
        return f'unknown key "{short(where)}"{nearest(word, _known_keys(parents))}'
    if kind == "missing":
        return f'the key "{where}" is missing'
    if kind == "value_error":
        return short(str(context["error"]), 600)
    if kind == "literal_error":
        return f"{where} must be one of {context['expected']}, got {quoted(given)}"
    if kind in _EXPECTED:
        return f"{where} must be {_EXPECTED[kind]}, got {quoted(given)}"
    bounds = {
        "greater_than": ("gt", "above"),
        "greater_than_equal": ("ge", "at least"),
        "less_than": ("lt", "below"),
        "less_than_equal": ("le", "at most"),
    }
    if kind in bounds:
        key, word = bounds[kind]
        return f"{where} must be {word} {context[key]}, got {quoted(given)}"
    return f"{where}: {first['msg']}, got {quoted(given)}"


def _known_keys(parents: Sequence[str]) -> list[str]:
    block: type[Block] = RunConfig
    for part in parents:
        block = block_of(block.model_fields[part].annotation) or Block
    return list(block.model_fields)


def _absolute_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute: those of a split are relative to data.root, all others to the current directory."""
    data = config.data
    if data.dataset != "shapes":
        root = _expand(data.root)
        splits = {}
        for name in ("train", "val"):
            split = getattr(data, name)
            update = {
                key: str((root / _expand(value)).resolve())
                for key, value in split.model_dump().items()
                if value is not None
            }
            splits[name] = split.model_copy(update=update)
        data = data.model_copy(update={**splits, "root": ""})
    detector, run = config.detector, config.run
    if detector.config.endswith(".py") and _is_file(_expand(detector.config)):
        detector = detector.model_copy(update={"config": str(_expand(detector.config).resolve())})
    if detector.load_from:
        detector = detector.model_copy(update={"load_from": str(_expand(detector.load_from).resolve())})
    if run.work_dir:
        run = run.model_copy(update={"work_dir": str(_expand(run.work_dir).resolve())})
    return config.model_copy(update={"data": data, "detector": detector, "run": run})


def _expand(path: str) -> Path:
    try:
        return Path(os.path.expandvars(path)).expanduser()
    except RuntimeError:
        raise ConfigError(f'the path "{short(path, 200)}" begins with the home of a user that does not exist') from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False
