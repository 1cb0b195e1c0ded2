"""Prints docs/config.md from the schema: `python -m engine.config.document > docs/config.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.resume_policy import resume_policy
from engine.config.schema import Block, ResumePolicy, RunConfig, block_of

_INTRO = """# The JSON of a run

A file in `ds_configs` is a DeepSpeed config. DeepSpeed's own keys keep their meaning and are passed on unchanged
(`zero_optimization`, `bf16`, `fp16`, `gradient_clipping`, `tensorboard`, ...; the default of `gradient_clipping` is 0).
The blocks below are ours. `train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps` may be
left out or `"auto"`, if they can be computed from total = micro x accumulation x ranks.

`"recipe": "faster_rcnn_r50_agvm_sgd"` names a run of the paper. The recipe's rules and `train_batch_size` then give
every value that the file leaves out or sets to `"auto"` ([recipes.md](recipes.md)).

Any value can be changed on the command line: `--set schedule.epochs=3`, `--set 'data.scale=[640,480]'`,
`--set detector.options.backbone.depth=50`. Paths of `data.train` and `data.val` are relative to `data.root`, all others
to the current directory; `~` and `$VARIABLES` are expanded. The resolved config is saved as `config.json` in the work
dir. Running that file again repeats the run.

The column *resume* says whether a value may differ from the saved one when a run continues with `--resume`:

- `free`: yes. The weights stay the same, up to rounding.
- `changes`: yes. The run prints that its results differ from here on.
- `fixed`: no. The run stops with an error.

This page is generated: `python -m engine.config.document > docs/config.md`.
"""


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'`"{choice}"`' for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is list:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "object"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object, below"
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}.get(annotation, "any")


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel) or value is None or value == {} or value == []:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _blocks(block: type[Block], path: str) -> Iterator[tuple[str, type[Block]]]:
    """A block and all blocks below it, each with its dotted key."""
    yield path, block
    for name, field in block.model_fields.items():
        inner = block_of(field.annotation)
        if inner is not None:
            yield from _blocks(inner, f"{path}.{name}".lstrip("."))


def _resume(paths: list[str], name: str, extra: Any) -> str:
    """The resume policy of a field, which may differ between the places where its block is used."""
    policies = {path: resume_policy(f"{path}.{name}".lstrip(".")) for path in paths}
    if len(set(policies.values())) > 1:
        return ", ".join(f"{policy} in {path}" for path, policy in policies.items())
    free = "".join(f", `{key}`: free" for key in (extra or {}).get("free_keys", ()))
    return policies[paths[0]] + free


def page() -> str:
    places: dict[type[Block], list[str]] = {}
    for path, block in _blocks(RunConfig, ""):
        places.setdefault(block, []).append(path)
    lines = [_INTRO]
    for block, paths in places.items():
        fields = {k: f for k, f in block.model_fields.items() if block is not RunConfig or k in ("name", "recipe")}
        lines += [f"## {', '.join(paths) or 'Top level'}", ""]
        lines += ["| key | type | default | resume | meaning |", "|---|---|---|---|---|"]
        for name, field in fields.items():
            cells = (f"`{name}`", _type(field.annotation), _default(field.default))
            resume = _resume(paths, name, field.json_schema_extra)
            lines.append(f"| {' | '.join(cells)} | {resume} | {field.description} |")
        lines.append("")
    lines += ["## DeepSpeed's keys", "", "| resume | keys |", "|---|---|"]
    for policy in get_args(ResumePolicy):
        keys = ", ".join(f"`{key}`" for key, own in DEEPSPEED_KEYS.items() if own == policy)
        lines.append(f"| {policy} | {keys} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
