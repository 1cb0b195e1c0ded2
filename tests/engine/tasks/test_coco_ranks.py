"""AP that several ranks compute together is that of one rank, to the bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from engine import distributed
from engine.data.annotation_table import AnnotationTable, pack_objects
from engine.data.types import Classes
from engine.tasks.coco_ranks import score_categories
from engine.tasks.coco_scores import category_ids_for, coco_results, score, summary

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 on numpy 2
CATEGORIES = 7
# Labels are not in the order of the file's categories, and those are not in the order of their ids.
CLASSES = Classes(tuple(f"class {k}" for k in (3, 1, 0, 6, 5, 2, 4)), (), tuple(range(1, 8)))


def rectangle(box):
    mask = np.zeros((96, 128), np.uint8)
    x, y, w, h = (int(v) for v in box)
    mask[y : y + h, x : x + w] = 1
    return coco_mask.encode(np.asfortranarray(mask))


def made_up(images=12):
    """Objects of six categories, crowds among them, and shaky predictions; nothing is found of the last category, and
    the fourth has no objects."""
    noise = np.random.default_rng(3)
    content = {
        "images": [{"id": 3 * k + 1, "file_name": f"{k}.jpg", "height": 96, "width": 128} for k in range(images)],
        "categories": [{"id": 50 - 7 * k, "name": f"class {k}"} for k in range(CATEGORIES)],
        "annotations": [],
    }
    ids = category_ids_for(CLASSES, content)
    predictions = []
    for image in content["images"]:
        boxes, labels = [], []
        for _ in range(noise.integers(0, 9)):
            x, y, w, h = noise.uniform(0, 60), noise.uniform(0, 50), noise.uniform(3, 60), noise.uniform(3, 45)
            label = int(noise.integers(CATEGORIES))
            if label != 3:
                content["annotations"].append(
                    {
                        "image_id": image["id"],
                        "category_id": ids[label],
                        "bbox": [x, y, w, h],
                        "area": w * h,
                        "iscrowd": int(noise.random() < 0.1),
                        "segmentation": {
                            "size": [96, 128],
                            "counts": rectangle((x, y, w, h))["counts"].decode(),
                        },
                    }
                )
            for _ in range(noise.integers(0, 3)):
                x1, y1 = max(0, x + noise.normal(0, 2)), max(0, y + noise.normal(0, 2))
                boxes.append((x1, y1, x1 + w, y1 + h))
                labels.append(label if label != 6 else 5)
        boxes = np.array(boxes, np.float32).reshape(-1, 4)
        predictions.append(
            dict(
                image_id=image["id"],
                boxes=boxes,
                scores=noise.random(len(boxes)).astype(np.float32).round(1),  # with ties
                labels=np.array(labels, np.int64),
                masks=[rectangle((x, y, X - x, Y - y)) for x, y, X, Y in boxes.tolist()],
            )
        )
    return content, ids, predictions


def with_ranks(backend, masks, empty):
    content, ids, predictions = made_up()
    if empty:
        predictions = [
            {**p, **{key: p[key][:0] for key in ("boxes", "scores", "labels", "masks")}} for p in predictions
        ]
    truth = AnnotationTable(pack_objects(content, masks=masks))
    first = distributed.rank() == 0
    parts = score_categories(predictions if first else None, truth, CLASSES, masks=masks, backend=backend)
    shares = None if parts is None else [len(part.category_ids) for part in parts["bbox"]]
    return shares, None if parts is None else json.dumps(summary(parts, CLASSES, ids, backend))


@pytest.mark.parametrize("backend", ["pycocotools", "faster-coco-eval"])
@pytest.mark.parametrize("masks", [False, True])
def test_the_score_of_several_ranks_is_that_of_one(ranks, backend, masks):
    content, ids, predictions = made_up()
    results = {kind: coco_results(predictions, ids, masks=kind == "segm") for kind in ["bbox", "segm"][: 1 + masks]}
    expected = score(content, results, CLASSES, ids, backend)
    assert 0.05 < expected[0]["bbox_mAP"] < 0.95
    for world in (2, 4):
        (shares, found), *others = ranks.run(with_ranks, world, backend, masks, False)
        assert len(shares) == world and sum(shares) == CATEGORIES
        assert found == json.dumps(expected)
        assert others == [(None, None)] * (world - 1)


def test_without_predictions_there_is_nothing_to_divide(ranks):
    assert ranks.run(with_ranks, 2, "pycocotools", False, True) == [(None, None)] * 2
