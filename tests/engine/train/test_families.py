"""A detector of every kind trains two steps on tiny data and is scored: `benchmarks/mmdet_families.py` in small."""

import pytest
from tiny_detectors import DETECTORS, detector
from tiny_run import merged, train_tiny

AGVM = {"type": "AGVMAdamW", "params": {"lr": 1e-3, "tau": 1, "start_step": 0}}
BF16 = {"bf16": {"enabled": True}}
# Name: ranks, ZeRO stage, and what else is different. A kind is tried where it is hardest.
RUNS = {
    "retinanet_timm": (2, 1, {}),
    "atss": (2, 3, {"detector": {"zero_init": True}}),  # has parameters without dimensions
    "gfl": (2, 3, {}),  # has a linear layer whose weight is a vector
    "tood": (1, 0, {}),
    "yolox": (1, 2, {}),
    "rtmdet": (1, 2, BF16),  # SyncBN
    "rpn": (1, 0, {}),
    "faster_rcnn_swin": (2, 3, {}),
    "mask_rcnn": (2, 2, {}),
    "htc_semantic": (1, 2, {}),
    "mask2former": (2, 3, {"optimizer": AGVM}),
    "mask2former_panoptic": (1, 2, BF16),
    "dino": (1, 2, {**BF16, "optimizer": AGVM}),
    "panoptic_fpn": (2, 3, {}),
    "semantic_fpn": (2, 1, {}),
}
SCORES = {"detection": "bbox_mAP", "instance": "segm_mAP", "panoptic": "PQ_st", "semantic": "mIoU"}


def train_family(name, stage, changes):
    run = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "data": {"shapes": {"train_images": 6, "val_images": 2}},
        "schedule": {"steps": 2},
        "run": {"eval_interval": None, "draw": 1},
    }
    result = train_tiny(merged(changes, merged(detector(name), run)))
    return {key: result[key] for key in ("records", "metrics", "files", "mu", "printed")}


@pytest.mark.parametrize("name", RUNS)
def test_a_detector_trains_and_is_scored(ranks, name):
    world, stage, changes = RUNS[name]
    result = ranks.run(train_family, world, name, stage, changes)[0]
    assert len(result["records"]) == 2 and all(0 < record["loss"] < 1e3 for record in result["records"])
    task = DETECTORS[name][0]
    assert 0 <= result["metrics"][SCORES[task]] <= 100 and ("segm_mAP" in result["metrics"]) == (task == "instance")
    results = "results.bbox.json" if task in ("detection", "instance") else "results.classes.json"
    assert {"eval.json", results, "predictions.png"} <= set(result["files"])
    if "optimizer" in changes:
        assert result["records"][-1]["phi"].keys() == result["mu"].keys() and "agvm    " in result["printed"]


def test_the_list_is_complete():
    assert RUNS.keys() == DETECTORS.keys()
