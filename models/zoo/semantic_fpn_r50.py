"""Semantic FPN on ResNet-50, as the paper trains it on ADE20K.

Widths, dropout and normalisation (batch norm; synchronised by `detector.sync_bn`) are mmseg's. Its backbone begins with
three 3x3 convolutions instead of one 7x7; here it is the ResNet of the other pipelines, whose weights are easier to
come by: {"backbone.deep_stem": true} is mmseg's.
"""

norm = dict(type="BN", requires_grad=True)

model = dict(
    type="SemanticFPN",
    data_preprocessor=dict(
        type="DetDataPreprocessor",
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=32,
        pad_seg=True,
        seg_pad_value=255,
    ),
    backbone=dict(
        type="ResNet",
        depth=50,
        num_stages=4,
        out_indices=(0, 1, 2, 3),
        frozen_stages=-1,
        norm_cfg=norm,
        norm_eval=False,
        style="pytorch",
    ),
    neck=dict(type="FPN", in_channels=[256, 512, 1024, 2048], out_channels=256, num_outs=4),
    semantic_head=dict(
        type="SemanticFPNHead",
        num_classes=150,
        in_channels=256,
        inner_channels=128,
        strides=(4, 8, 16, 32),
        dropout=0.1,
        norm_cfg=norm,
    ),
)
