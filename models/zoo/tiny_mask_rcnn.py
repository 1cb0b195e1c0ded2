"""Mask R-CNN at the size of `tiny_faster_rcnn`: two mask convolutions of 64 channels."""

_base_ = "tiny_faster_rcnn.py"

model = dict(
    type="MaskRCNN",
    roi_head=dict(
        mask_roi_extractor=dict(
            type="SingleRoIExtractor",
            roi_layer=dict(type="RoIAlign", output_size=14, sampling_ratio=2),
            out_channels=64,
            featmap_strides=[4, 8, 16, 32],
            finest_scale=28,
        ),
        mask_head=dict(
            type="FCNMaskHead",
            num_convs=2,
            in_channels=64,
            conv_out_channels=64,
            num_classes=80,
            loss_mask=dict(type="CrossEntropyLoss", use_mask=True, loss_weight=1.0),
        ),
    ),
    train_cfg=dict(rcnn=dict(mask_size=28)),
    test_cfg=dict(rcnn=dict(mask_thr_binary=0.5)),
)
