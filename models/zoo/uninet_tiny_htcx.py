"""The shape of UniNet-G + HTC-X for images of 100 to 250 pixels and two cores: tests and demos.

Four levels (P3-P6); anchors of 16 to 128 pixels; 32 regions per image. It learns from random weights in a few hundred
steps: residual branches start at 0.1 instead of 1e-6, and the last layers of the box heads see every pixel of a region.
The context loss is a mean over classes. Demo data has few classes, and an image shows many of them: with COCO's weight
of 3, this loss would be half of the total.
"""

_base_ = "uninet_g_htcx.py"

tiny_strides = [8, 16, 32, 64]

model = dict(
    backbone=dict(arch="tiny", drop_path_rate=0.0, layer_scale=0.1),
    neck=dict(in_channels=[40, 64, 96], out_channels=64, num_outs=4, sepc_depth=2),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[2], strides=tiny_strides)),
    roi_head=dict(
        bbox_roi_extractor=dict(roi_layer=dict(sampling_ratio=2), out_channels=64, finest_scale=40),
        bbox_head=dict(in_channels=64, cls_depth=2, reg_depth=2, num_heads=4, pooling="flatten"),
        context_head=dict(in_channels=64, conv_out_channels=64, num_convs=2, loss_weight=0.3),
        mask_roi_extractor=dict(roi_layer=dict(sampling_ratio=2), out_channels=64, finest_scale=40),
        mask_head=dict(in_channels=64, conv_out_channels=64, num_convs=2),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
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
                sampler=dict(type="RandomSampler", num=32, pos_fraction=0.5, neg_pos_ub=-1, add_gt_as_proposals=True),
                mask_size=28,
                pos_weight=-1,
                debug=False,
            )
            for iou in (0.6, 0.7, 0.8)
        ],
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100), rcnn=dict(max_per_img=50)),
)
