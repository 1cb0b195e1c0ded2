"""The blocks of a network, by name: what is recomputed as one, and what counts as one layer."""

from __future__ import annotations

import re


def block_name(parameter_name: str) -> str | None:
    """The name up to its second number: `backbone.layer3.1.conv1.weight` -> `backbone.layer3.1`.

    mmdet, timm and UniNet all count a stage and then a block in it, so everything inside a block shares this name.
    None for what is in no block: stems, norms behind a stage, necks and heads.
    """
    parts, numbers = parameter_name.split("."), 0
    for position, part in enumerate(parts):
        numbers += part.isdigit() or bool(re.fullmatch(r"(layer|stage)s?_?\d+", part))
        if numbers == 2:
            return ".".join(parts[: position + 1])
    return None
