"""The class map that HTC's semantic branch learns from, pixel by pixel."""

import numpy as np
import torch

from engine.modeling.pixel_classes import draw_class_map
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.structures import DetDataSample  # noqa: E402
from mmdet.structures.mask import BitmapMasks  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402


def test_the_smallest_object_is_on_top_and_padding_is_ignored():
    small, large = np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8)
    small[0, 0] = 1
    large[0:2, 0:2] = 1
    sample = DetDataSample(metainfo=dict(img_shape=(3, 4), batch_input_shape=(4, 6)))
    masks = BitmapMasks(np.stack([small, large]), 3, 4)
    sample.gt_instances = InstanceData(masks=masks, labels=torch.tensor([2, 0]))
    draw_class_map(sample, background=7)
    assert sample.gt_sem_seg.sem_seg.tolist() == [
        [[2, 0, 7, 7, 255, 255], [0, 0, 7, 7, 255, 255], [7, 7, 7, 7, 255, 255], [255] * 6]
    ]
