"""RetinaNet at the size of the quickstart: a half-width ResNet-18 and a 64-channel pyramid of strides 8 to 32.

Objects of 128-pixel images are about 12 to 70 pixels wide, so the smallest anchors are two strides, 16 pixels.
"""

_base_ = "_base_/resnet18.py"

model = dict(
    type="RetinaNet",
    backbone=dict(base_channels=32),
    neck=dict(type="FPN", in_channels=[32, 64, 128, 256], start_level=1, out_channels=64, num_outs=3),
    bbox_head=dict(
        type="RetinaHead",
        num_classes=80,
        in_channels=64,
        stacked_convs=2,
        feat_channels=64,
        norm_cfg=dict(type="GN", num_groups=16),
        anchor_generator=dict(
            type="AnchorGenerator", octave_base_scale=2, scales_per_octave=3, ratios=[1.0], strides=[8, 16, 32]
        ),
        bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[1.0] * 4),
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=1.0),
    ),
    train_cfg=dict(
        assigner=dict(type="MaxIoUAssigner", pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0, ignore_iof_thr=-1),
        sampler=dict(type="PseudoSampler"),
        allowed_border=-1,
        pos_weight=-1,
        debug=False,
    ),
    test_cfg=dict(
        nms_pre=500, min_bbox_size=0, score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=100
    ),
)
