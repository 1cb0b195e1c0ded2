"""Semantic FPN on ResNet-50, as the paper trains it on ADE20K.

Widths, dropout and normalisation (batch norm; synchronised by `detector.sync_bn`) are mmseg's. The backbone of mmseg
begins with three 3x3 convolutions instead of one 7x7: {"backbone.deep_stem": true}. The default here is the ResNet of
the other pipelines, whose weights are easier to find.
"""

_base_ = "_base_/resnet18.py"

model = dict(
    type="SemanticFPN",
    data_preprocessor=dict(pad_seg=True, seg_pad_value=255),
    backbone=dict(depth=50),
    neck=dict(type="FPN", in_channels=[256, 512, 1024, 2048], out_channels=256, num_outs=4),
    semantic_head=dict(
        type="SemanticFPNHead",
        num_classes=150,
        in_channels=256,
        inner_channels=128,
        strides=(4, 8, 16, 32),
        dropout=0.1,
        norm_cfg=dict(type="BN", requires_grad=True),
    ),
)
