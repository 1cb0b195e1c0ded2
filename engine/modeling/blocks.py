"""The blocks of a network, found by name. A block is recomputed as a unit and counts as one layer."""

from __future__ import annotations

import re


def block_name(parameter_name: str) -> str | None:
    """The name up to its second number: `backbone.layer3.1.conv1.weight` -> `backbone.layer3.1`.

    mmdet, timm and UniNet number stages and then the blocks in a stage, so all parameters of a block share this name.
    None for parameters outside of blocks: stems, norms after a stage, necks and heads.
    """
    parts, numbers = parameter_name.split("."), 0
    for position, part in enumerate(parts):
        numbers += part.isdigit() or bool(re.fullmatch(r"(layer|stage)s?_?\d+", part))
        if numbers == 2:
            return ".".join(parts[: position + 1])
    return None
