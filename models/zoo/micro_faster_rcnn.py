"""Faster R-CNN for images of 64 pixels and studies of many runs: a quarter-width ResNet-18 and 32 channels.

Objects of such images are 6 to 35 pixels large, and anchors are too. Regions cost most at this size, so an image trains
on 32 of them, with 5 x 5 bins each.
"""

_base_ = "tiny_faster_rcnn.py"

model = dict(
    backbone=dict(base_channels=16),
    neck=dict(in_channels=[16, 32, 64, 128], out_channels=32, num_outs=4),
    rpn_head=dict(
        in_channels=32, feat_channels=32, anchor_generator=dict(scales=[2.5], ratios=[1.0], strides=[4, 8, 16, 32])
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(roi_layer=dict(output_size=5), out_channels=32, finest_scale=14),
        bbox_head=dict(in_channels=32, fc_out_channels=128, roi_feat_size=5),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)), rpn_proposal=dict(nms_pre=200, max_per_img=64), rcnn=dict(sampler=dict(num=32))
    ),
    test_cfg=dict(rpn=dict(nms_pre=100, max_per_img=32), rcnn=dict(max_per_img=20)),
)
