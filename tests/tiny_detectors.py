"""One detector of every kind, as small as its parts allow: changes of the tiny run (`tiny_run.py`)."""

from __future__ import annotations

from typing import Any

GROUPS = {"type": "GN", "num_groups": 4}
R18 = {
    "backbone.depth": 18,
    "backbone.base_channels": 8,
    "backbone.frozen_stages": -1,
    "backbone.norm_eval": False,
    "neck.in_channels": [8, 16, 32, 64],
}
NARROW = {**R18, "neck.out_channels": 16}
DENSE = {**NARROW, "bbox_head.in_channels": 16, "bbox_head.feat_channels": 16, "bbox_head.stacked_convs": 1}
RCNN = {
    **NARROW,
    "rpn_head.in_channels": 16,
    "rpn_head.feat_channels": 16,
    "roi_head.bbox_roi_extractor.out_channels": 16,
    "train_cfg.rpn_proposal.nms_pre": 100,
    "train_cfg.rpn_proposal.max_per_img": 50,
    "test_cfg.rpn.nms_pre": 100,
    "test_cfg.rpn.max_per_img": 20,
    "test_cfg.rcnn.max_per_img": 5,
}
BOX_HEAD = {"roi_head.bbox_head.in_channels": 16, "roi_head.bbox_head.fc_out_channels": 16}
MASK_HEAD = {
    "roi_head.mask_roi_extractor.out_channels": 16,
    "roi_head.mask_head.in_channels": 16,
    "roi_head.mask_head.conv_out_channels": 16,
    "roi_head.mask_head.num_convs": 1,
}
CASCADE = {
    **{f"roi_head.bbox_head.{stage}.in_channels": 16 for stage in range(3)},
    **{f"roi_head.bbox_head.{stage}.fc_out_channels": 16 for stage in range(3)},
}
HTC_MASKS = {
    "roi_head.mask_roi_extractor.out_channels": 16,
    **{f"roi_head.mask_head.{stage}.num_convs": 1 for stage in range(3)},
    **{f"roi_head.mask_head.{stage}.in_channels": 16 for stage in range(3)},
    **{f"roi_head.mask_head.{stage}.conv_out_channels": 16 for stage in range(3)},
    "roi_head.semantic_roi_extractor.out_channels": 16,
    "roi_head.semantic_head.in_channels": 16,
    "roi_head.semantic_head.conv_out_channels": 16,
    "roi_head.semantic_head.num_convs": 1,
}
SWIN = {
    "backbone": {
        "type": "SwinTransformer",
        "_delete_": True,
        "embed_dims": 12,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "window_size": 4,
        "drop_path_rate": 0.1,
    },
    "neck.in_channels": [12, 24, 48, 96],
}
DINO_OPTIONS = {
    "backbone.base_channels": 8,
    "backbone.norm_cfg": GROUPS,
    "neck.in_channels": [16, 32, 64],
    "num_queries": 10,
    "encoder.num_layers": 1,
    "decoder.num_layers": 2,
}
_WIDTH = {"embed_dims": 32, "num_heads": 4}
MASK2FORMER_OPTIONS = {
    "backbone.depth": 18,
    "backbone.base_channels": 8,
    "backbone.norm_eval": False,
    "backbone.norm_cfg": GROUPS,
    "panoptic_head.in_channels": [8, 16, 32, 64],
    "panoptic_head.feat_channels": 32,
    "panoptic_head.out_channels": 32,
    "panoptic_head.num_queries": 10,
    "panoptic_head.positional_encoding.num_feats": 16,
    "panoptic_head.pixel_decoder.norm_cfg": GROUPS,
    "panoptic_head.pixel_decoder.positional_encoding.num_feats": 16,
    "panoptic_head.pixel_decoder.encoder.num_layers": 1,
    "panoptic_head.pixel_decoder.encoder.layer_cfg.self_attn_cfg": {**_WIDTH, "num_levels": 3, "num_points": 4},
    "panoptic_head.pixel_decoder.encoder.layer_cfg.ffn_cfg": {"embed_dims": 32, "feedforward_channels": 64},
    "panoptic_head.transformer_decoder.num_layers": 2,
    "panoptic_head.transformer_decoder.layer_cfg.self_attn_cfg": _WIDTH,
    "panoptic_head.transformer_decoder.layer_cfg.cross_attn_cfg": _WIDTH,
    "panoptic_head.transformer_decoder.layer_cfg.ffn_cfg": {"embed_dims": 32, "feedforward_channels": 64},
    "train_cfg.num_points": 256,
}
RTMDET_OPTIONS = {
    "backbone.widen_factor": 0.125,
    "neck.in_channels": [32, 64, 128],
    "neck.out_channels": 16,
    "neck.num_csp_blocks": 1,
    "bbox_head.in_channels": 16,
    "bbox_head.feat_channels": 16,
    "bbox_head.stacked_convs": 1,
}
YOLOX_OPTIONS = {
    **{f"{part}.norm_cfg": {"_delete_": True, **GROUPS} for part in ("backbone", "neck", "bbox_head")},
    "backbone.widen_factor": 0.125,
    "neck.in_channels": [32, 64, 128],
    "neck.out_channels": 16,
    "bbox_head.in_channels": 16,
    "bbox_head.feat_channels": 16,
}
LITTLE_TIMM = {
    "backbone": {"type": "TimmBackbone", "_delete_": True, "model_name": "resnet10t"},
    "neck.in_channels": [64, 128, 256, 512],
}

# Name: task, config, options.
DETECTORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "retinanet_timm": ("detection", "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py", {**DENSE, **LITTLE_TIMM}),
    "atss": ("detection", "mmdet::atss/atss_r50_fpn_1x_coco.py", {**DENSE, "bbox_head.norm_cfg": GROUPS}),
    "gfl": ("detection", "mmdet::gfl/gfl_r50_fpn_1x_coco.py", {**DENSE, "bbox_head.norm_cfg": GROUPS}),
    "tood": (
        "detection",
        "mmdet::tood/tood_r50_fpn_1x_coco.py",
        {**DENSE, "bbox_head.stacked_convs": 2, "bbox_head.norm_cfg": GROUPS},
    ),
    "yolox": ("detection", "mmdet::yolox/yolox_tiny_8xb8-300e_coco.py", YOLOX_OPTIONS),
    "rtmdet": ("detection", "mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py", RTMDET_OPTIONS),
    "rpn": (
        "detection",
        "mmdet::rpn/rpn_r50_fpn_1x_coco.py",
        {**NARROW, "rpn_head.in_channels": 16, "rpn_head.feat_channels": 16},
    ),
    "faster_rcnn_swin": (
        "detection",
        "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
        {**RCNN, **BOX_HEAD, **SWIN},
    ),
    "mask_rcnn": ("instance", "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", {**RCNN, **BOX_HEAD, **MASK_HEAD}),
    "htc_semantic": ("instance", "mmdet::htc/htc_r50_fpn_1x_coco.py", {**RCNN, **CASCADE, **HTC_MASKS}),
    "mask2former": ("instance", "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", MASK2FORMER_OPTIONS),
    "mask2former_panoptic": (
        "panoptic",
        "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py",
        MASK2FORMER_OPTIONS,
    ),
    "dino": ("detection", "tiny_dino", DINO_OPTIONS),
    "panoptic_fpn": ("panoptic", "tiny_panoptic_fpn", {}),
    "semantic_fpn": ("semantic", "tiny_semantic_fpn", {}),
}


def detector(name: str) -> dict[str, Any]:
    """The blocks `detector` and `data` of a run."""
    task, config, options = DETECTORS[name]
    kept = {key: value for key, value in options.items() if not (key.startswith("backbone.") and "backbone" in options)}
    return {"detector": {"config": config, "options": kept}, "data": {"task": task}}
