"""docs/config.md, made from the schema: `python -m engine.config.document > docs/config.md`."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from engine.config import schema

_INTRO = """# The JSON of a run

A file in `ds_configs` is a DeepSpeed config: DeepSpeed's own keys keep their own meaning and are passed on untouched
(`zero_optimization`, `bf16`, `fp16`, `gradient_clipping`, `tensorboard`, ...; `gradient_clipping` is 0 where it is left
out). Beside them stand the blocks below. `train_batch_size`, `train_micro_batch_size_per_gpu` and
`gradient_accumulation_steps` may be left out or `"auto"`, as long as total = micro x accumulation x ranks can be solved.

`"recipe": "faster_rcnn_r50_agvm_sgd"` names a run of the paper: what the file leaves out or sets to `"auto"` then follows
from the recipe's rules and `train_batch_size` ([recipes.md](recipes.md)).

Any value can be changed from the command line: `--set schedule.epochs=3`, `--set 'data.scale=[640,480]'`,
`--set detector.options.backbone.depth=50`. Paths are relative to the current directory, those of `data.train` and
`data.val` to `data.root`; `~` and `$VARIABLES` are expanded. The resolved config is saved as `config.json` in the work
dir, and running that file again repeats the run.

This page is made from the schema: `python -m engine.config.document > docs/config.md`.
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


def page() -> str:
    sections = [
        ("detector", schema.DetectorConfig),
        ("detector.ablation", schema.AblationConfig),
        ("data", schema.DataConfig),
        ("data.train, data.val", schema.SplitConfig),
        ("data.shapes", schema.ShapesConfig),
        ("data.classification", schema.ClassificationConfig),
        ("optimizer", schema.OptimizerConfig),
        ("optimizer.paramwise", schema.ParamwiseConfig),
        ("optimizer.sam", schema.SamConfig),
        ("schedule", schema.ScheduleConfig),
        ("run", schema.RunSettings),
    ]
    lines = [_INTRO]
    for title, model in sections:
        lines += [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            lines.append(f"| `{name}` | {_type(field.annotation)} | {_default(field.default)} | {field.description} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
