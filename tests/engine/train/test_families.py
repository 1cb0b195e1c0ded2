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
SMALL_RCNN = {
    **R18,
    "train_cfg.rpn_proposal.nms_pre": 100,
    "train_cfg.rpn_proposal.max_per_img": 50,
    "test_cfg.rpn.nms_pre": 100,
    "test_cfg.rpn.max_per_img": 20,
    "test_cfg.rcnn.max_per_img": 5,
}
THIN_CASCADE = {f"roi_head.bbox_head.{stage}.fc_out_channels": 32 for stage in range(3)}
THIN_HTC_MASKS = {f"roi_head.mask_head.{stage}.num_convs": 1 for stage in range(3)}
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
    "retinanet": ("detection", "mmdet::retinanet/retinanet_r50_fpn_1x_coco.py", R18),
    "atss": ("detection", "mmdet::atss/atss_r50_fpn_1x_coco.py", R18),  # has parameters without dimensions
    "faster_rcnn": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", SMALL_RCNN),
    "faster_rcnn_swin": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {**SMALL_RCNN, **SWIN}),
    "faster_rcnn_timm": ("detection", "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", {**SMALL_RCNN, **TIMM}),
    "mask_rcnn": ("instance", "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", SMALL_RCNN),
    "cascade_mask_rcnn": (
        "instance",
        "mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py",
        {**SMALL_RCNN, **THIN_CASCADE, "roi_head.mask_head.num_convs": 1},
    ),
    "htc": (
        "instance",
        "mmdet::htc/htc-without-semantic_r50_fpn_1x_coco.py",
        {**SMALL_RCNN, **THIN_CASCADE, **THIN_HTC_MASKS},
    ),
    "panoptic_fpn": ("panoptic", "mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py", SMALL_RCNN),
    "panoptic_fpn_swin": ("panoptic", "panoptic_fpn_swin_t", {**SMALL_RCNN, **SWIN}),
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
