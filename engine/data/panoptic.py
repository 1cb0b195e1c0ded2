"""Panoptic PNGs for mmdet, without the package panopticapi, which is on no registry."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.datasets.transforms import LoadAnnotations, LoadPanopticAnnotations  # noqa: E402
from mmdet.registry import TRANSFORMS  # noqa: E402


def segment_ids(png: np.ndarray) -> np.ndarray:
    """Segment id of every pixel of an RGB panoptic PNG: R + 256 G + 256^2 B."""
    png = png.astype(np.int64)
    return png[..., 0] + 256 * png[..., 1] + 256**2 * png[..., 2]


@TRANSFORMS.register_module(force=True)
class LoadPanoptic(LoadPanopticAnnotations):
    """mmdet's LoadPanopticAnnotations, which needs panopticapi for nothing but `segment_ids`."""

    def __init__(self, **options: Any) -> None:
        self.rgb2id = segment_ids
        LoadAnnotations.__init__(self, with_bbox=True, with_label=True, with_mask=True, with_seg=True, **options)
