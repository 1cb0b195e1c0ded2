"""Apply the ablations of a config to an mmdet model dictionary before the model is built."""

from __future__ import annotations

from typing import Any


def apply_ablations(model: Any, *, no_fpn: bool, independent_heads: bool, ignored_pixels: float) -> None:
    """Change the dictionary in place. Raise ValueError if an ablation does not fit the detector."""
    if no_fpn:
        from models.ablations.no_fpn import remove_fpn

        remove_fpn(model)
    if not independent_heads and not ignored_pixels:
        return
    from models.ablations.heads import ABLATED

    name = "rpn_head" if "rpn_head" in model else "bbox_head"
    kind = (model.get(name) or {}).get("type")
    if kind not in ABLATED:
        raise ValueError(
            f"independent_heads and ignored_pixels are made for {' and '.join(ABLATED)}, but the {name} of this "
            f"detector is {kind}"
        )
    model[name]["type"] = ABLATED[kind]
    model[name]["independent_levels"] = independent_heads
    model[name]["ignored_pixels"] = ignored_pixels
