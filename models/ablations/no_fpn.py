"""No pyramid: the heads see only the last feature map of the backbone.

A 1x1 convolution changes it to the pyramid's width, so that the heads stay the same. The anchors of all levels are
placed on it, as in the C4 detectors before pyramids. Both are our reading: the paper says "remove FPN and only adopt
the final-level feature map to perform detection".
"""

from __future__ import annotations

from typing import Any


def remove_fpn(model: Any) -> None:
    """Change an mmdet model dictionary in place. Raise ValueError if there is no FPN that can be removed."""
    neck, backbone = model.get("neck"), model["backbone"]
    if not isinstance(neck, dict) or neck.get("type") != "FPN":
        found = neck.get("type") if isinstance(neck, dict) else neck
        raise ValueError(f"no_fpn takes mmdet's FPN away, but the neck of this detector is {found}")
    if "semantic_head" in model:
        raise ValueError("no_fpn leaves one level, but the semantic head of this detector joins several")
    if not backbone.get("out_indices"):
        raise ValueError(
            "no_fpn keeps the last of the maps that the backbone's out_indices name, but this detector leaves them "
            'out: give them in detector.options, such as "backbone.out_indices": [0, 1, 2, 3]'
        )
    heads = [model[name] for name in ("bbox_head", "rpn_head") if model.get(name)]
    if not heads or any(head.get("anchor_generator", {}).get("type") != "AnchorGenerator" for head in heads):
        raise ValueError(
            "no_fpn moves the anchors of all levels to the last one, but this detector has no such anchors"
        )

    width = neck["in_channels"][-1]
    level = len(neck["in_channels"]) - 1 - neck.get("start_level", 0)  # the pyramid level of the backbone's last map
    backbone["out_indices"] = (backbone["out_indices"][-1],)
    model["neck"] = dict(
        type="ChannelMapper",
        in_channels=[width],
        kernel_size=1,
        out_channels=neck["out_channels"],
        act_cfg=None,
        num_outs=1,
    )
    for head in heads:
        head["anchor_generator"] = _on_one_level(head["anchor_generator"], level)
    for name in ("bbox_roi_extractor", "mask_roi_extractor"):
        extractor = (model.get("roi_head") or {}).get(name)
        if extractor is not None:
            extractor["featmap_strides"] = [extractor["featmap_strides"][level]]


def _on_one_level(generator: Any, level: int) -> dict[str, Any]:
    """Anchors of the same sizes, all on one level. A scale is a size in units of the stride."""
    generator = dict(generator)
    octaves = generator.pop("scales_per_octave", None)
    base = generator.pop("octave_base_scale", None)
    scales = generator["scales"] if octaves is None else [base * 2 ** (i / octaves) for i in range(octaves)]
    strides = generator["strides"]
    return {
        **generator,
        "strides": [strides[level]],
        "scales": [scale * stride / strides[level] for stride in strides for scale in scales],
    }
