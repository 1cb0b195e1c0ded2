"""Fill in a JSON that names a recipe. The user's own values win; the recipe's rules give the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.config.keys import split_key, value_at
from engine.config.optimizer_names import spelled
from engine.config.schema import RunConfig
from engine.errors import ConfigError, nearest, quoted, short
from engine.recipes import Recipe, Setting, find_recipe, recipe_names
from engine.recipes.options import ABSENT, AUTO, as_tree, lay_under, part_at

# A run uses one of each pair. If the user gives a length in steps, the recipe's epochs are dropped.
_EITHER = ({"schedule.epochs", "schedule.steps"}, {"schedule.warmup_epochs", "schedule.warmup_steps"})
_SPLITS = ("data.train", "data.val")  # all from the user or all from the recipe
_BELONGING = {
    "detector.config": "detector.",
    "data.dataset": "data.",
}  # settings below depend on the model, the data set
# Blocks in which "auto" means the recipe's value. In mmdet's and DeepSpeed's keys "auto" has another meaning.
_OURS = ("detector", "data", "optimizer", "schedule")
_FOREIGN = ("detector.options", "data.augmentation")
_OPTIONS = "detector.options."
_SOURCES = {"paper": "", "code": " [the authors' code]", "ours": " [ours]"}


def fill_recipe(data: dict[str, Any]) -> dict[str, Any]:
    """Replace what `data` leaves out or sets to "auto" by its recipe's values. Without a recipe, return `data`."""
    name = data.get("recipe")
    if name is None:
        for key in _autos(data):
            raise ConfigError(f'{key} is "auto" but no recipe is named: give a value, or a "recipe" (docs/recipes.md)')
        return data
    recipe = _find(name)
    batch = _batch(data, name)
    data = copy.deepcopy(data)
    for key in [key for pair in _EITHER for key in pair if value_at(data, key, ABSENT) is None]:
        _remove(data, key)  # a saved config has null for the one that was not given
    values = {setting.key: setting.value for setting in recipe.settings(batch)} | recipe.files()
    own_rule = _own(data, "optimizer.type", recipe, batch)
    if own_rule:
        raise ConfigError(
            f'recipe "{name}" trains with {values["optimizer.type"]} but optimizer.type is "{own_rule}": leave the '
            f"type out, or name another recipe{nearest(_other_rule(recipe, own_rule), recipe_names())}"
        )
    skipped = _without_say(data, recipe, batch)
    if any(_is_given(data, split) for split in _SPLITS):
        skipped.update(_SPLITS)
    values = {key: value for key, value in values.items() if key not in skipped}
    _fill_options(
        data, {key.removeprefix(_OPTIONS): value for key, value in values.items() if key.startswith(_OPTIONS)}
    )
    for key, value in values.items():
        if not key.startswith(_OPTIONS) and _is_free(data, key):
            _put(data, key, copy.deepcopy(value))
    for pair in _EITHER:
        if any(_is_given(data, key) for key in pair):  # the user gave one length, so "auto" does not ask for the other
            for key in [key for key in pair if value_at(data, key) == AUTO]:
                _remove(data, key)
    for key in _autos(data):
        raise ConfigError(f'{key} is "auto" but recipe "{name}" has no value for it: give one')
    return data


def explain(config: RunConfig) -> list[str]:
    """A line for every value of the config's recipe: the rule that gave it, or the user's value beside the recipe's."""
    if config.recipe is None:
        return []
    data, batch = config.to_json(), config.deepspeed["train_batch_size"]
    lines = [f"recipe  {config.recipe} at batch {batch}"]
    recipe = find_recipe(config.recipe)
    skipped = _without_say(data, recipe, batch)
    options = data["detector"]["options"]
    for setting in recipe.settings(batch):
        if setting.key in skipped:
            continue
        if setting.key.startswith(_OPTIONS):
            lines += _option_lines(setting, options)
        else:
            lines.append(_line(setting.key, value_at(data, setting.key), setting.value, _rule(setting)))
    for key, value in recipe.files().items():
        if key not in skipped:
            lines.append(_file_line(key, value_at(data, key), value))
    return lines


def _rule(setting: Setting) -> str:
    return setting.rule + _SOURCES[setting.source]


def _line(key: str, given: Any, theirs: Any, rule: str) -> str:
    if given == theirs:
        return f"  {key} {_text(given)}  ({rule})"
    return f"  {key} {_text(given)}  (yours, where the recipe has {_text(theirs)}: {rule})"


def _option_lines(setting: Setting, options: Mapping[str, Any]) -> list[str]:
    """A line for one of the recipe's options. If it is a dictionary, lines for the user's values in it follow."""
    key = setting.key.removeprefix(_OPTIONS)
    given = options[key] if key in options else part_at(as_tree(options), key)
    lines = [_line(setting.key, None if given is ABSENT else given, setting.value, _rule(setting))]
    for inside in options if isinstance(setting.value, dict) else ():
        if inside.startswith(f"{key}."):
            theirs = part_at(as_tree({key: setting.value}), inside)
            text = "nothing" if theirs is ABSENT else _text(theirs)
            lines.append(
                f"  {_OPTIONS}{inside} {_text(options[inside])}  (yours, where the recipe has {text}: {_rule(setting)})"
            )
    return lines


def _file_line(key: str, given: Any, theirs: Any) -> str:
    """A line for files. Given paths are absolute by now; they are the recipe's if they end like the recipe's."""
    given_files, their_files = (node if isinstance(node, Mapping) else {"": node} for node in (given, theirs))
    pairs = [(given_files.get(word), name) for word, name in their_files.items()]
    is_theirs = all(
        path is not None and Path(path).parts[-len(Path(name).parts) :] == Path(name).parts for path, name in pairs
    )
    text, other = (
        ", ".join(str(path) for path in files.values() if path is not None) or "left out"
        for files in (given_files, their_files)
    )
    return f"  {key} {text}  (" + ("the recipe's files)" if is_theirs else f"yours, where the recipe has {other})")


def _text(value: Any) -> str:
    if value is None:
        return "left out"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _find(name: Any) -> Recipe:
    if not isinstance(name, str):
        raise ConfigError(f"recipe must be the name of one, such as {recipe_names()[0]}, got {quoted(name)}")
    try:
        return find_recipe(name)
    except KeyError:
        raise ConfigError(
            f'there is no recipe "{short(name)}"{nearest(name, recipe_names())}: docs/recipes.md lists them'
        ) from None


def _batch(data: Mapping[str, Any], name: str) -> int:
    batch = data.get("train_batch_size")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        given = "it is not given" if batch is None else f"got {quoted(batch)}"
        raise ConfigError(f'recipe "{name}" follows train_batch_size, which must be a whole number >= 1: {given}')
    return batch


def _own(data: Mapping[str, Any], key: str, recipe: Recipe, batch: int) -> Any:
    """The user's value if it differs from the recipe's, else None."""
    given = value_at(data, key)
    theirs = next(setting.value for setting in recipe.settings(batch) if setting.key == key)
    if key == "optimizer.type" and isinstance(given, str):
        given = spelled(given)
    return given if given not in (None, AUTO, theirs) else None


def _without_say(data: Mapping[str, Any], recipe: Recipe, batch: int) -> set[str]:
    """Keys for which the recipe's values do not apply: its options and weights are for its own model, its image sizes
    and files for its own data set."""
    keys = [setting.key for setting in recipe.settings(batch)] + list(recipe.files())
    blocks = tuple(block for key, block in _BELONGING.items() if _own(data, key, recipe, batch))
    return {key for key in keys if key.startswith(blocks)} - {*_BELONGING, "data.task"}


def _other_rule(recipe: Recipe, kind: Any) -> str:
    """The name of this recipe with another optimizer."""
    stem = recipe.name.rsplit("_", 1)[0].removesuffix("_agvm")
    word = str(kind).lower()
    return f"{stem}_agvm_{word.removeprefix('agvm')}" if word.startswith("agvm") else f"{stem}_{word}"


def _is_given(data: Mapping[str, Any], key: str) -> bool:
    return value_at(data, key) not in (None, AUTO)


def _is_free(data: Mapping[str, Any], key: str) -> bool:
    taken = any(key in pair and any(_is_given(data, other) for other in pair) for pair in _EITHER)
    return value_at(data, key, AUTO) == AUTO and not taken


def _fill_options(data: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    own = value_at(data, "detector.options", AUTO)
    if theirs and (own == AUTO or isinstance(own, dict)):  # anything else is refused by validation
        _put(data, "detector.options", lay_under(theirs, {} if own == AUTO else own))


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = split_key(key)
    node = data
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return  # not an object: validation will say so
    node[last] = value


def _remove(data: dict[str, Any], key: str) -> None:
    *parents, last = split_key(key)
    for part in parents:
        data = data[part]
    del data[last]


def _autos(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("gradient_clipping") == AUTO:
        yield "gradient_clipping"
    for block in _OURS:
        yield from _autos_below(data.get(block), block)


def _autos_below(node: Any, key: str) -> Iterator[str]:
    if node == AUTO:
        yield key
    elif isinstance(node, Mapping) and key not in _FOREIGN:
        for word, value in node.items():
            yield from _autos_below(value, f"{key}.{word}")
