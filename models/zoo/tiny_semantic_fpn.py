"""Semantic FPN for images of 100 to 160 pixels and two cores: a half-width ResNet-18 and 64 channels."""

_base_ = "semantic_fpn_r50.py"

model = dict(
    backbone=dict(depth=18, base_channels=32),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=64),
    semantic_head=dict(in_channels=64, inner_channels=64, dropout=0.0, norm_cfg=dict(type="GN", num_groups=16)),
)
