"""Every detector family that the paper names trains two steps on tiny data, on two ranks."""

import pytest
from tiny_run import train_tiny

R18 = {
    "backbone.depth": 18,
    "backbone.base_channels": 8,
    "backbone.frozen_stages": -1,
    "backbone.norm_eval": False,
    "neck.in_channels": [8, 16, 32, 64],
}
ONE_STAGE = {  # 64 channels, for ATSS has group norms of 32 groups, and its last map has one pixel
    **R18,
    "neck.out_channels": 64,
    "bbox_head.in_channels": 64,
    "bbox_head.feat_channels": 64,
    "bbox_head.stacked_convs": 1,
}


def thin(head):
    return {f"{head}.in_channels": 32, f"{head}.fc_out_channels": 32}


def thin_masks(head):
    return {f"{head}.in_channels": 32, f"{head}.conv_out_channels": 32, f"{head}.num_convs": 1}


SMALL_RPN = {
    **R18,
    "neck.out_channels": 32,
    "rpn_head.in_channels": 32,
    "rpn_head.feat_channels": 32,
    "roi_head.bbox_roi_extractor.out_channels": 32,
    "train_cfg.rpn_proposal.nms_pre": 100,
    "train_cfg.rpn_proposal.max_per_img": 50,
    "test_cfg.rpn.nms_pre": 100,
    "test_cfg.rpn.max_per_img": 20,
    "test_cfg.rcnn.max_per_img": 5,
}
FASTER = {**SMALL_RPN, **thin("roi_head.bbox_head")}
MASK_EXTRACTOR = {"roi_head.mask_roi_extractor.out_channels": 32}
MASK = {**FASTER, **MASK_EXTRACTOR, **thin_masks("roi_head.mask_head")}
CASCADE = {**SMALL_RPN, **MASK_EXTRACTOR}
for stage in range(3):
    CASCADE |= thin(f"roi_head.bbox_head.{stage}")
HTC = dict(CASCADE)
for stage in range(3):
    HTC |= thin_masks(f"roi_head.mask_head.{stage}")
PANOPTIC = {**MASK, "semantic_head.in_channels": 32, "semantic_head.inner_channels": 32}
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
TIMM = {
    "backbone": {"type": "TimmBackbone", "_delete_": True, "model_name": "resnet10t"},
    "neck.in_channels": [64, 128, 256, 512],
}

FAMILIES = {
    "retinanet": ("detection", "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py", ONE_STAGE),
    "atss": ("detection", "mmdet::atss/atss_r50_fpn_1x_coco.py", ONE_STAGE),  # has parameters without dimensions
    "faster_rcnn": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", FASTER),
    "faster_rcnn_swin": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {**FASTER, **SWIN}),
    "faster_rcnn_timm": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {**FASTER, **TIMM}),
    "mask_rcnn": ("instance", "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", MASK),
    "cascade_mask_rcnn": (
        "instance",
        "mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py",
        {**CASCADE, **thin_masks("roi_head.mask_head")},
    ),
    "htc": ("instance", "mmdet::htc/htc-without-semantic_r50_fpn_1x_coco.py", HTC),
    "panoptic_fpn": ("panoptic", "mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py", PANOPTIC),
    "panoptic_fpn_swin": ("panoptic", "panoptic_fpn_swin_t", {**PANOPTIC, **SWIN}),
    "semantic_fpn": ("semantic", "semantic_fpn_r50", R18),
    "semantic_fpn_swin": ("semantic", "semantic_fpn_swin_t", SWIN),
}
SCORES = {"detection": "bbox_mAP", "instance": "segm_mAP", "panoptic": "PQ_st", "semantic": "mIoU"}


def family(name, stage):
    task, config, options = FAMILIES[name]
    options = {k: v for k, v in options.items() if not (k.startswith("backbone.") and "backbone" in options)}
    return {
        "detector": {"config": config, "options": options},
        "data": {"task": task},
        "zero_optimization": {"stage": stage},
        "schedule": {"steps": 2},
        "run": {"eval_interval": None, "draw": 2},
    }


def train_family(name, stage, zero_init=False):
    changes = family(name, stage)
    changes["detector"]["zero_init"] = zero_init
    result = train_tiny(changes)
    return result["records"], result["metrics"], result["files"]


@pytest.mark.parametrize("name,stage", [(name, (2, 3, 1, 0)[i % 4]) for i, name in enumerate(FAMILIES)])
def test_family_trains_and_is_scored(ranks, name, stage):
    records, metrics, files = ranks.run(train_family, 2, name, stage)[0]
    assert len(records) == 2 and all(0 < record["loss"] < 1e3 for record in records)
    task = FAMILIES[name][0]
    assert 0 <= metrics[SCORES[task]] <= 100 and ("segm_mAP" in metrics) == (task == "instance")
    results = "results.bbox.json" if task in ("detection", "instance") else "results.classes.json"
    assert {"eval.json", results, "predictions.png"} <= set(files)


def test_parameters_without_dimensions_train_alike_partitioned_from_the_start(ranks):
    plain, _, _ = ranks.run(train_family, 2, "atss", 0)[0]
    partitioned, _, _ = ranks.run(train_family, 2, "atss", 3, True)[0]
    assert [r["loss"] for r in partitioned] == pytest.approx([r["loss"] for r in plain], rel=1e-5)
