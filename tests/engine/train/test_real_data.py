"""Real photographs: the shipped BCCD config with few steps, and two images of COCO-panoptic. Skipped if absent."""

import os
from pathlib import Path

import pytest
from tiny_run import train_tiny

DATA = Path(os.environ.get("GIGADET_DATA", Path(__file__).parents[3] / "shared" / "data")).resolve()
SAMPLE = DATA / "coco_panoptic_sample"
needs_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"no COCO panoptic sample below {DATA}")
needs_bccd = pytest.mark.skipif(not (DATA / "bccd" / "train.json").is_file(), reason=f"no BCCD below {DATA}")


def train_bccd(root):
    from engine.recipes.load import load_config

    short = [f"data.root={root}", "data.workers=0", 'schedule={"steps": 2}', "data.scale=[128,96]"]
    result = train_tiny(load_config("bccd_retinanet_r18", short).to_json())
    return result["records"], result["metrics"], result["files"]


@needs_bccd
def test_bccd_trains_and_is_scored_on_two_ranks(ranks):
    records, metrics, files = ranks.run(train_bccd, 2, str(DATA / "bccd"))[0]
    assert len(records) == 2 and all(0 < record["loss"] < 100 for record in records)
    assert set(metrics) >= {"bbox_mAP", "bbox_mAP_50"} and "predictions.png" in files


@needs_bccd
def test_bccd_classes_and_counts():
    from engine.data.build import build_data
    from engine.recipes.load import load_config

    train, val, classes = build_data(load_config("bccd_retinanet_r18", [f"data.root={DATA / 'bccd'}"]).data)
    assert classes.things == ("RBC", "WBC", "Platelets")
    assert (len(train.dataset), len(val.dataset)) == (205, 87)


def train_panoptic(root):
    files = {"annotations": "panoptic_examples.json", "images": "input_images", "panoptic": "panoptic_examples"}
    result = train_tiny(
        {
            "train_batch_size": 2,
            "detector": {"config": "tiny_panoptic_fpn", "options": {}},
            "schedule": {"steps": 2},
            "data": {
                "dataset": "coco",
                "task": "panoptic",
                "root": root,
                "train": files,
                "val": files,
                "scale": [160, 120],
                "train_scales": None,
            },
            "run": {"eval_interval": None},
        }
    )
    return result["records"], result["metrics"], result["files"]


@needs_sample
def test_the_coco_panoptic_sample_trains_and_is_scored_on_two_ranks(ranks):
    records, metrics, files = ranks.run(train_panoptic, 2, str(SAMPLE))[0]
    assert all(0 < record["loss_seg"] < 10 and record["loss_mask"] > 0 for record in records)
    assert 0 <= metrics["PQ"] < 50 and {"predictions.png", "results.classes.json"} <= set(files)
