"""How long COCO's score takes on one rank and on two: 80 classes, made-up boxes and shaky predictions.

python benchmarks/scoring_ranks.py --images 2000 --backend pycocotools
"""

import argparse
import json
import os
import tempfile
import time

import numpy as np
import torch.multiprocessing as mp

from engine import distributed
from engine.data.annotation_table import AnnotationTable, pack_objects
from engine.data.types import Classes
from engine.tasks.coco_ranks import score_categories
from engine.tasks.coco_scores import coco_results, score, summary
from engine.zero.processes import init_distributed

CLASSES = Classes(tuple(f"class {k}" for k in range(80)), (), tuple(range(80)))


def made_up(images: int) -> tuple[dict, list[dict]]:
    """Seven objects and a hundred predictions an image, as in COCO."""
    noise = np.random.default_rng(0)
    content: dict = {
        "images": [{"id": k, "file_name": f"{k}.jpg", "width": 640, "height": 480} for k in range(images)],
        "categories": [{"id": k, "name": f"class {k}"} for k in range(80)],
        "annotations": [],
    }
    predictions = []
    for image in range(images):
        boxes = np.concatenate([noise.uniform(0, 300, (7, 2)), noise.uniform(10, 170, (7, 2))], 1)
        labels = noise.integers(0, 80, 7)
        content["annotations"] += [
            {"image_id": image, "category_id": int(label), "bbox": box.tolist()} for box, label in zip(boxes, labels)
        ]
        of = noise.integers(0, 7, 100)
        found = boxes[of] + noise.normal(0, 6, (100, 4))
        found[:, 2:] = found[:, :2] + np.maximum(found[:, 2:], 2)
        predictions.append(
            dict(image_id=image, boxes=found.astype(np.float32), scores=noise.random(100), labels=labels[of])
        )
    return content, predictions


def rank_main(rank: int, world: int, images: int, backend: str, store: str, answers) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    init_distributed(init_method=f"file://{store}", rank=rank, world_size=world)
    content, predictions = made_up(images)
    truth = AnnotationTable(pack_objects(content, masks=False))
    distributed.barrier()
    began, processor = time.perf_counter(), time.process_time()
    if world == 1:
        results = {"bbox": coco_results(predictions, CLASSES.category_ids, masks=False)}
        scores = score(truth.content(), results, CLASSES, CLASSES.category_ids, backend)
    else:
        parts = score_categories(predictions if rank == 0 else None, truth, CLASSES, masks=False, backend=backend)
        scores = None if parts is None else summary(parts, CLASSES, CLASSES.category_ids, backend)
    spent = time.perf_counter() - began, time.process_time() - processor
    answers.put((*spent, json.dumps(scores) if rank == 0 else None))


def run(world: int, images: int, backend: str) -> str:
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    store = tempfile.mktemp(prefix="gigadet-store-")
    ranks = [context.Process(target=rank_main, args=(r, world, images, backend, store, answers)) for r in range(world)]
    for process in ranks:
        process.start()
    found = [answers.get() for _ in ranks]
    for process in ranks:
        process.join()
    seconds, processor = max(f[0] for f in found), max(f[1] for f in found)
    print(f"{world} ranks: {seconds:.1f} s, of the processor {processor:.1f} s on the busiest rank", flush=True)
    return next(f[2] for f in found if f[2])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--images", type=int, default=2000)
    arguments.add_argument("--backend", default="pycocotools")
    options = arguments.parse_args()
    one, two = (run(world, options.images, options.backend) for world in (1, 2))
    print(f"equal: {one == two}; bbox_mAP {json.loads(one)[0]['bbox_mAP']:.4f}")


if __name__ == "__main__":
    main()
