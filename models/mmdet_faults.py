"""Faults of mmdet (3.5.1) that would end an evaluation, put right from outside."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.models.dense_heads import SSDHead
from mmdet.models.roi_heads.mask_heads import fcn_mask_head

_paste = fcn_mask_head._do_paste_mask


def _paste_inside(masks: torch.Tensor, boxes: torch.Tensor, img_h: int, img_w: int, skip_empty: bool = True) -> Any:
    """On a CPU mmdet pastes only the region of a box, and fails where that has no pixel: QueryInst's boxes may lie
    outside the image or be turned inside out."""
    if skip_empty:
        left, top = (boxes.min(dim=0).values.floor()[:2] - 1).clamp(min=0).tolist()
        right, bottom = min(float(boxes[:, 2].max().ceil()) + 1, img_w), min(float(boxes[:, 3].max().ceil()) + 1, img_h)
        if not (left < right and top < bottom):  # also where a corner is not a number
            return masks.new_zeros(len(masks), 0, 0), (slice(0, 0), slice(0, 0))
    return _paste(masks, boxes, img_h, img_w, skip_empty)


fcn_mask_head._do_paste_mask = _paste_inside
# The base class asks every head's classification loss for the kind of its scores. SSD's head has none, but calls torch.
SSDHead.loss_cls = None
