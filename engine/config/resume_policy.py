"""What `--resume` does with a changed key, as its field in the schema declares it."""

from __future__ import annotations

from typing import Any

from engine.config.deepspeed_keys import DEEPSPEED_KEYS
from engine.config.schema import Block, ResumePolicy, RunConfig, block_of


def resume_policy(key: str) -> ResumePolicy:
    """The policy of a dotted key: that of the first field on its path that has one. Unknown keys are fixed."""
    parts = key.split(".")
    if parts[0] in DEEPSPEED_KEYS:
        return DEEPSPEED_KEYS[parts[0]]
    block: type[Block] = RunConfig
    for part, *below in (parts[place:] for place in range(len(parts))):
        field = block.model_fields.get(part)
        if field is None:
            break
        extra: Any = field.json_schema_extra or {}
        if "resume" in extra:
            return "free" if below and below[0] in extra["free_keys"] else extra["resume"]
        block = block_of(field.annotation) or Block
    return "fixed"
