"""Panoptic FPN on Swin-Tiny."""

_base_ = "mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py"

model = dict(
    backbone=dict(
        _delete_=True,
        type="SwinTransformer",
        embed_dims=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        drop_path_rate=0.2,
        out_indices=(0, 1, 2, 3),
        convert_weights=True,
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
