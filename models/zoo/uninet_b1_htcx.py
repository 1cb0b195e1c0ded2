"""HTC-X on UniNet-B1, all parts at a quarter of the width: the paper's detector for one GPU."""

_base_ = "uninet_g_htcx.py"

model = dict(
    backbone=dict(arch=dict(_delete_=True, base="b1", attention=("window", "window", "global")), drop_path_rate=0.1),
    neck=dict(in_channels=[80, 128, 256], out_channels=96),
    rpn_head=dict(in_channels=96, feat_channels=96),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96),
        bbox_head=dict(in_channels=96),
        context_head=dict(in_channels=96, conv_out_channels=96),
        mask_roi_extractor=dict(out_channels=96),
        mask_head=dict(in_channels=96, conv_out_channels=96),
    ),
)
