"""Panoptic FPN at the size of `tiny_mask_rcnn`.

A stuff class of fewer than 64 pixels is removed from a map. COCO's limit of 4096 is a quarter of an image here.
"""

_base_ = "tiny_mask_rcnn.py"

model = dict(
    type="PanopticFPN",
    data_preprocessor=dict(pad_mask=True, mask_pad_value=0, pad_seg=True, seg_pad_value=255),
    semantic_head=dict(
        type="PanopticFPNHead",
        num_things_classes=80,
        num_stuff_classes=53,
        in_channels=64,
        inner_channels=64,
        start_level=0,
        end_level=4,
        norm_cfg=dict(type="GN", num_groups=16, requires_grad=True),
        loss_seg=dict(type="CrossEntropyLoss", ignore_index=255, loss_weight=0.5),
    ),
    panoptic_fusion_head=dict(type="HeuristicFusionHead", num_things_classes=80, num_stuff_classes=53),
    test_cfg=dict(
        rcnn=dict(score_thr=0.5, nms=dict(type="nms", iou_threshold=0.5, class_agnostic=True)),
        panoptic=dict(mask_overlap=0.5, stuff_area_limit=64),
    ),
)
