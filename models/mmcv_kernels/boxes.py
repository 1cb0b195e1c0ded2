"""Overlap and suppression of boxes: IoU, NMS, soft NMS, NMS match and the NMS of lanes.

With `offset` 1, the older convention, a box from x1 to x2 is x2 - x1 + 1 wide. Adding one to x2 and y2 gives the same
widths, overlaps and areas, so one IoU function serves both conventions.
"""

from __future__ import annotations

import numpy as np
import torch
import torchvision
from torch import Tensor

from models.mmcv_kernels.precision import widen

__all__ = ["bbox_overlaps", "line_nms_forward", "nms", "nms_match", "softnms"]


def nms(boxes: Tensor, scores: Tensor, *, iou_threshold: float, offset: int) -> Tensor:
    boxes, scores = widen(boxes, scores)
    return torchvision.ops.nms(_moved(boxes, offset), scores, iou_threshold)


def _moved(boxes: Tensor, offset: int) -> Tensor:
    return torch.cat([boxes[:, :2], boxes[:, 2:] + offset], 1) if offset else boxes


def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    *,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Fills `dets` with boxes and decayed scores, best first, and returns their indices.

    Each step keeps the best box, whatever its score. `min_score` only removes boxes after their score was decayed.
    """
    boxes, scores = widen(boxes.detach(), scores.detach())
    # Each step depends on the one before, so this is a loop of small operations. numpy has less overhead per operation.
    left, decayed = _moved(boxes, offset).numpy().T.copy(), scores.numpy().copy()
    indices: np.ndarray = np.arange(len(decayed))
    keep, kept_scores = [], []
    while len(indices):
        best = decayed.argmax()
        keep.append(indices[best])
        kept_scores.append(decayed[best])
        iou = _iou_with(left[:, best], left)
        if method == 2:
            decayed *= np.exp(-(iou**2) / sigma)
        else:
            decayed *= np.where(iou >= iou_threshold, 1 - iou if method == 1 else 0, 1)
        alive = decayed >= min_score
        alive[best] = False
        left, decayed, indices = left[:, alive], decayed[alive], indices[alive]
    kept = torch.tensor(keep, dtype=torch.long)
    dets[: len(kept)] = torch.cat([boxes[kept], scores.new_tensor(kept_scores)[:, None]], 1).to(dets.dtype)
    return kept


def nms_match(dets: Tensor, *, iou_threshold: float) -> list[list[int]]:
    """Groups: a kept box, then the boxes it suppressed, each in the order of their scores."""
    (dets,) = widen(dets)
    order = dets[:, 4].argsort(descending=True, stable=True).numpy()
    boxes = dets[:, :4].numpy().T.copy()
    groups = []
    while len(order):
        same = _iou_with(boxes[:, order[0]], boxes[:, order]) >= iou_threshold
        same[0] = True  # a box without area overlaps nothing, not even itself
        groups.append(order[same].tolist())
        order = order[~same]
    return groups


def _iou_with(box: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """IoU of one box (4,) with others (4, n). With one coordinate per row, numpy is three times as fast."""
    width = np.minimum(box[2], boxes[2]) - np.maximum(box[0], boxes[0])
    height = np.minimum(box[3], boxes[3]) - np.maximum(box[1], boxes[1])
    overlap = np.maximum(width, 0) * np.maximum(height, 0)
    union = (box[2] - box[0]) * (box[3] - box[1]) + (boxes[2] - boxes[0]) * (boxes[3] - boxes[1]) - overlap
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)


def bbox_overlaps(boxes1: Tensor, boxes2: Tensor, ious: Tensor, *, mode: int, aligned: bool, offset: int) -> None:
    from mmcv.ops.bbox import _bbox_overlaps_cpu  # plain torch, on any device

    ious.copy_(_bbox_overlaps_cpu(*widen(boxes1, boxes2), ("iou", "iof")[mode], aligned, offset))


def line_nms_forward(lanes: Tensor, scores: Tensor, overlap: float, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """NMS of CLRNet's lanes: a lane is (., ., start in 0..1, ., length in strips, x at each of the strips' ends).

    A better lane suppresses another one if their mean horizontal distance, over the strips that both cover, is below
    `overlap`. Returns the kept indices padded with zeros, their number, and for each lane the rank + 1 of the lane that
    suppressed it or of itself (0 for neither). mmcv 2.3.6's kernel compares the lanes in their given order and reads
    the result in score order. Here both are in score order, which is the same if the lanes come sorted.
    """
    order = scores.argsort(descending=True)
    lanes = widen(lanes)[0][order]
    x = lanes[:, 5:]
    count = x.shape[1]
    start = (lanes[:, 2] * (count - 1) + 0.5).long()
    end = start + lanes[:, 4].long() - 1
    positions = torch.arange(count, device=lanes.device)
    covers = (start[:, None] <= positions) & (positions <= end[:, None])
    removed = torch.zeros(len(lanes), dtype=torch.bool, device=lanes.device)
    keep, parent = torch.zeros_like(order), torch.zeros_like(order)
    kept = 0
    for i in range(len(lanes)):
        if removed[i]:
            continue
        both = covers[i] & covers
        near = ((x - x[i]).abs() * both).sum(1) < overlap * both.sum(1)
        near[: i + 1] = False
        keep[kept] = order[i]
        kept += 1
        parent[order[near]] = kept
        parent[order[i]] = kept
        removed |= near
        if kept == top_k:
            break
    return keep, torch.tensor(kept, device=lanes.device), parent
