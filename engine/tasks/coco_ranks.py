"""AP with all ranks: each rank scores some of the categories.

COCO's evaluation treats every category by itself and takes means at the end. Each rank therefore gets the predictions
of its categories from rank 0, reads their truth from its own arrays, and sends back precision and recall. Rank 0 puts
them together in the order of the categories, so that the metrics are those of one rank to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import distributed
from engine.data.annotation_table import AnnotationTable
from engine.data.types import Classes
from engine.tasks.base import Prediction
from engine.tasks.coco_scores import Part, category_ids_for, coco_results, evaluate_categories


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one rank scores: categories by their number in the file, and the objects that were found of them."""

    numbers: list[int]
    images: list[int | str]  # of each object
    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray
    masks: list[Any] | None

    def predictions(self) -> list[Prediction]:
        """A prediction for each object, in the order of the images."""
        return [
            dict(
                image_id=image,
                boxes=self.boxes[place : place + 1],
                scores=self.scores[place : place + 1],
                labels=self.labels[place : place + 1],
                **({} if self.masks is None else {"masks": self.masks[place : place + 1]}),
            )
            for place, image in enumerate(self.images)
        ]


def score_categories(
    predictions: Sequence[Prediction] | None, truth: AnnotationTable, classes: Classes, *, masks: bool, backend: str
) -> dict[str, list[Part]] | None:
    """On rank 0 the parts of the score by kind, computed by all ranks; None on the others, and if nothing was found.

    All ranks call this; rank 0 has the predictions.
    """
    category_ids = category_ids_for(classes, {"categories": truth.categories})
    with distributed.together():
        shares = None if predictions is None else _shares(predictions, truth, category_ids, masks=masks)
    share = distributed.scatter_objects(shares)
    parts: dict[str, Part] = {}
    with distributed.together():
        if share is not None and share.numbers:
            mine = set(share.numbers)
            content, found = truth.content(mine.__contains__), share.predictions()
            wanted = [truth.categories[number]["id"] for number in share.numbers]
            for kind in ("bbox", "segm") if masks else ("bbox",):
                results = coco_results(found, category_ids, masks=kind == "segm")
                parts[kind] = evaluate_categories(content, results, kind, backend, wanted)
    gathered = distributed.gather_objects(parts)
    if gathered is None or not any(gathered):
        return None
    return {kind: [part[kind] for part in gathered if kind in part] for kind in next(filter(None, gathered))}


def _shares(
    predictions: Sequence[Prediction], truth: AnnotationTable, category_ids: Sequence[int], *, masks: bool
) -> list[_Share | None]:
    """A share for each rank; None for all of them if nothing was found."""
    world = distributed.world_size()
    counts = [len(prediction["labels"]) for prediction in predictions]
    if not sum(counts):
        return [None] * world
    boxes, scores, labels = (
        np.concatenate([np.asarray(prediction[key]) for prediction in predictions])
        for key in ("boxes", "scores", "labels")
    )
    images = [prediction["image_id"] for prediction, count in zip(predictions, counts) for _ in range(count)]
    found_masks = [mask for prediction in predictions for mask in prediction["masks"]] if masks else None
    number_of = {category["id"]: number for number, category in enumerate(truth.categories)}
    numbers = np.array([number_of[category] for category in category_ids], np.int64)
    work = np.bincount(numbers[labels], minlength=len(truth.categories))
    work += np.bincount(truth.arrays["category"], minlength=len(truth.categories))
    owners = _owners(work, world)
    owner = owners[numbers[labels]]
    shares: list[_Share | None] = []
    for rank in range(world):
        places = np.flatnonzero(owner == rank)
        shares.append(
            _Share(
                numbers=np.flatnonzero(owners == rank).tolist(),
                images=[images[place] for place in places],
                boxes=boxes[places],
                scores=scores[places],
                labels=labels[places],
                masks=None if found_masks is None else [found_masks[place] for place in places],
            )
        )
    return shares


def _owners(work: np.ndarray, world: int) -> np.ndarray:
    """The rank of each category: the one with the most work goes to the rank with the least so far."""
    loads = [(0, rank) for rank in range(world)]
    owners = np.zeros(len(work), np.int64)
    for number in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + int(work[number]) + 1, rank))  # an empty category is work too
    return owners
