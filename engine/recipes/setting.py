"""One value of a recipe, with its rule and the rule's source."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

# "code": not in the paper but in the authors' published configs of Faster and Mask R-CNN. "ours": in neither.
Source = Literal["paper", "code", "ours"]


class Setting(NamedTuple):
    key: str  # dotted, as in --set
    value: Any
    rule: str
    source: Source = "paper"
