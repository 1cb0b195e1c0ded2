"""DINO at the size of 128-pixel images: a half-width ResNet-18, three maps of 64 channels, two layers on each side.

Objects of such images are 12 to 70 pixels wide and at most a handful, so 40 queries are plenty. The backbone starts
from random weights, so its batch norms are trained.
"""

_base_ = "_base_/resnet18.py"

_attention = dict(embed_dims=64, num_heads=4, dropout=0.0)
_across_levels = dict(embed_dims=64, num_heads=4, num_levels=3, num_points=4, dropout=0.0)
_feedforward = dict(embed_dims=64, feedforward_channels=256, ffn_drop=0.0)

model = dict(
    type="DINO",
    num_queries=40,
    num_feature_levels=3,
    with_box_refine=True,
    as_two_stage=True,
    backbone=dict(base_channels=32, out_indices=(1, 2, 3)),
    neck=dict(
        type="ChannelMapper",
        in_channels=[64, 128, 256],
        kernel_size=1,
        out_channels=64,
        act_cfg=None,
        norm_cfg=dict(type="GN", num_groups=16),
        num_outs=3,
    ),
    encoder=dict(num_layers=2, layer_cfg=dict(self_attn_cfg=_across_levels, ffn_cfg=_feedforward)),
    decoder=dict(
        num_layers=2,
        return_intermediate=True,
        layer_cfg=dict(self_attn_cfg=_attention, cross_attn_cfg=_across_levels, ffn_cfg=_feedforward),
        post_norm_cfg=None,
    ),
    positional_encoding=dict(num_feats=32, normalize=True, offset=0.0, temperature=20),
    bbox_head=dict(
        type="DINOHead",
        num_classes=80,
        embed_dims=64,
        sync_cls_avg_factor=True,
        loss_cls=dict(type="FocalLoss", use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=1.0),
        loss_bbox=dict(type="L1Loss", loss_weight=5.0),
        loss_iou=dict(type="GIoULoss", loss_weight=2.0),
    ),
    dn_cfg=dict(
        label_noise_scale=0.5,
        box_noise_scale=1.0,
        group_cfg=dict(dynamic=True, num_groups=None, num_dn_queries=20),
    ),
    train_cfg=dict(
        assigner=dict(
            type="HungarianAssigner",
            match_costs=[
                dict(type="FocalLossCost", weight=2.0),
                dict(type="BBoxL1Cost", weight=5.0, box_format="xywh"),
                dict(type="IoUCost", iou_mode="giou", weight=2.0),
            ],
        )
    ),
    test_cfg=dict(max_per_img=40),
)
