"""One value of a recipe, with the rule that gave it and where the rule comes from."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

# "code": the authors' published configs of Faster and Mask R-CNN, where the paper is silent. "ours": neither says it.
Source = Literal["paper", "code", "ours"]


class Setting(NamedTuple):
    key: str  # dotted, as --set takes it
    value: Any
    rule: str
    source: Source = "paper"
