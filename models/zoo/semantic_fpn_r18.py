"""Semantic FPN on ResNet-18."""

_base_ = "semantic_fpn_r50.py"

model = dict(backbone=dict(depth=18), neck=dict(in_channels=[64, 128, 256, 512]))
