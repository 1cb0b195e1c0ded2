"""Faster R-CNN for images of 100 to 160 pixels and two cores: a half-width ResNet-18, 64 channels, strides 4 to 32.

Anchors are 16 to 128 pixels large. Of the 64 regions of an image, up to half may be objects.
"""

_base_ = "_base_/resnet18.py"

sampler = dict(type="RandomSampler", num=128, pos_fraction=0.5, neg_pos_ub=-1, add_gt_as_proposals=False)

model = dict(
    type="FasterRCNN",
    backbone=dict(base_channels=32),
    neck=dict(type="FPN", in_channels=[32, 64, 128, 256], out_channels=64, num_outs=4),
    rpn_head=dict(
        type="RPNHead",
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(type="AnchorGenerator", scales=[4], ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32]),
        bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[1.0] * 4),
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=True, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=1.0),
    ),
    roi_head=dict(
        type="StandardRoIHead",
        bbox_roi_extractor=dict(
            type="SingleRoIExtractor",
            roi_layer=dict(type="RoIAlign", output_size=7, sampling_ratio=2),
            out_channels=64,
            featmap_strides=[4, 8, 16, 32],
            finest_scale=28,
        ),
        bbox_head=dict(
            type="Shared2FCBBoxHead",
            in_channels=64,
            fc_out_channels=256,
            roi_feat_size=7,
            num_classes=80,
            bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[0.1, 0.1, 0.2, 0.2]),
            reg_class_agnostic=True,
            loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
            loss_bbox=dict(type="L1Loss", loss_weight=1.0),
        ),
    ),
    train_cfg=dict(
        rpn=dict(
            assigner=dict(
                type="MaxIoUAssigner",
                pos_iou_thr=0.7,
                neg_iou_thr=0.3,
                min_pos_iou=0.3,
                match_low_quality=True,
                ignore_iof_thr=-1,
            ),
            sampler=sampler,
            allowed_border=-1,
            pos_weight=-1,
            debug=False,
        ),
        rpn_proposal=dict(nms_pre=500, max_per_img=200, nms=dict(type="nms", iou_threshold=0.7), min_bbox_size=0),
        rcnn=dict(
            assigner=dict(
                type="MaxIoUAssigner",
                pos_iou_thr=0.5,
                neg_iou_thr=0.5,
                min_pos_iou=0.5,
                match_low_quality=False,
                ignore_iof_thr=-1,
            ),
            sampler=dict(type="RandomSampler", num=64, pos_fraction=0.5, neg_pos_ub=-1, add_gt_as_proposals=True),
            pos_weight=-1,
            debug=False,
        ),
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=200, max_per_img=100, nms=dict(type="nms", iou_threshold=0.7), min_bbox_size=0),
        rcnn=dict(score_thr=0.05, nms=dict(type="nms", iou_threshold=0.5), max_per_img=50),
    ),
)
