"""UniNet-G + HTC-X, the paper's one-billion-parameter detector, with boxes and masks.

From the paper: UniNet-G, the RCNet + SEPC pyramid on P3-P8 with 384 channels, IoU 0.6/0.7/0.8 in the three stages of
the cascade, 4 + 4 decoupled transformer blocks, a mask branch for COCO, drop path 0.3 in pre-training. Inferred:
anchors of scale 4, `finest_scale` 112, drop path in detection, 4 context convolutions of weight 3, a mask head of 256
channels, and what the docstrings of the classes name. The rest is as in mmdet's cascades.
"""

channels = 384
strides = [8, 16, 32, 64, 128, 256]

model = dict(
    type="CascadeRCNN",
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_mask=True,
        pad_size_divisor=32,
    ),
    backbone=dict(
        type="UniNet",
        arch="g",
        out_indices=(2, 4, 5),
        drop_path_rate=0.3,
        norm_cfg=dict(type="BN", requires_grad=True),
        norm_eval=False,
    ),
    neck=dict(
        type="HTCXPyramid", in_channels=[384, 576, 1152], out_channels=channels, num_outs=len(strides), sepc_depth=4
    ),
    rpn_head=dict(
        type="RPNHead",
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(type="AnchorGenerator", scales=[4], ratios=[0.5, 1.0, 2.0], strides=strides),
        bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[1.0] * 4),
        loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=True, loss_weight=1.0),
        loss_bbox=dict(type="SmoothL1Loss", beta=1.0 / 9.0, loss_weight=1.0),
    ),
    roi_head=dict(
        type="HTCXRoIHead",
        num_stages=3,
        stage_loss_weights=[1.0, 0.5, 0.25],
        target_stds=[[0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067]],
        bbox_roi_extractor=dict(
            type="SingleRoIExtractor",
            roi_layer=dict(type="RoIAlign", output_size=7, sampling_ratio=0),
            out_channels=channels,
            featmap_strides=strides[:4],
            finest_scale=112,
        ),
        bbox_head=dict(
            type="DecoupledTransformerBoxHead",
            cls_depth=4,
            reg_depth=4,
            num_heads=8,
            mlp_ratio=1.0,
            pooling="mean",
            in_channels=channels,
            roi_feat_size=7,
            num_classes=80,
            reg_class_agnostic=True,
            bbox_coder=dict(type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[0.1, 0.1, 0.2, 0.2]),
            loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
            loss_bbox=dict(type="SmoothL1Loss", beta=1.0, loss_weight=1.0),
        ),
        context_level=3,
        context_head=dict(
            type="GlobalContextHead",
            num_convs=4,
            in_channels=channels,
            conv_out_channels=channels,
            num_classes=80,
            loss_weight=3.0,
        ),
        mask_roi_extractor=dict(
            type="SingleRoIExtractor",
            roi_layer=dict(type="RoIAlign", output_size=14, sampling_ratio=0),
            out_channels=channels,
            featmap_strides=strides[:4],
            finest_scale=112,
        ),
        mask_head=dict(
            type="FCNMaskHead",
            num_convs=4,
            in_channels=channels,
            conv_out_channels=256,
            num_classes=80,
            loss_mask=dict(type="CrossEntropyLoss", use_mask=True, loss_weight=1.0),
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
            sampler=dict(type="RandomSampler", num=256, pos_fraction=0.5, neg_pos_ub=-1, add_gt_as_proposals=False),
            allowed_border=0,
            pos_weight=-1,
            debug=False,
        ),
        rpn_proposal=dict(nms_pre=2000, max_per_img=2000, nms=dict(type="nms", iou_threshold=0.7), min_bbox_size=0),
        rcnn=[
            dict(
                assigner=dict(
                    type="MaxIoUAssigner",
                    pos_iou_thr=iou,
                    neg_iou_thr=iou,
                    min_pos_iou=iou,
                    match_low_quality=False,
                    ignore_iof_thr=-1,
                ),
                sampler=dict(type="RandomSampler", num=512, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True),
                mask_size=28,
                pos_weight=-1,
                debug=False,
            )
            for iou in (0.6, 0.7, 0.8)
        ],
    ),
    test_cfg=dict(
        rpn=dict(nms_pre=1000, max_per_img=1000, nms=dict(type="nms", iou_threshold=0.7), min_bbox_size=0),
        rcnn=dict(score_thr=0.001, nms=dict(type="soft_nms", iou_threshold=0.5), max_per_img=100, mask_thr_binary=0.5),
    ),
)

# Test-time augmentation: launch/evaluate.py --tta
tta_model = dict(type="DetTTAModel", tta_cfg=dict(nms=dict(type="soft_nms", iou_threshold=0.5), max_per_img=100))
