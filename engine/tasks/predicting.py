"""Predict on a data set with all ranks, and gather the predictions on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine import distributed
from engine.data.loader import evaluation_loader, readable
from engine.errors import UserError
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocess
from engine.monitoring.live import LiveLine
from engine.tasks.base import Prediction


@torch.no_grad()
def predict(
    model: Any,  # an nn.Module with mmdet's `predict`
    preprocess: Preprocess,
    precision: Precision,
    dataset: Any,
    *,
    batch: int,
    workers: int,
    as_numbers: Callable[[Any], Prediction],
    unreadable: list[str] | None = None,
) -> list[Prediction]:
    """This rank's share of the predictions: the model's output for each image, converted by `as_numbers`.

    An image that cannot be read is an error, or is left out if there is a list for the reasons (`unreadable`).
    """
    loader = evaluation_loader(
        dataset, rank=distributed.rank(), world=distributed.world_size(), batch=batch, workers=workers
    )
    line = LiveLine(
        total=len(loader), label="evaluate", interval=max(1, len(loader) // 5), enabled=distributed.rank() == 0
    )
    device = distributed.device()
    was_training = model.training
    model.eval()
    predictions: list[Prediction] = []
    for data in readable(loader, unreadable):
        images, samples = preprocess(data, training=False)
        with precision.autocast(device):
            outputs = model.predict(images, samples)
        predictions += map(as_numbers, outputs)
        line.update()
    line.close()
    model.train(was_training)
    return predictions


def gather_predictions(mine: list[Prediction], expected: int) -> list[Prediction] | None:
    """On rank 0 all predictions sorted by image id, each image exactly once; None on the others."""
    everything = gather_sorted(mine)
    if everything is None:
        return None
    ids = {p["image_id"] for p in everything}
    if len(everything) != expected or len(ids) != expected:
        raise UserError(
            f"evaluation scored {len(everything)} predictions of {len(ids)} images, expected {expected} of "
            f"{expected}: are image ids repeated in the annotation file?"
        )
    return everything


def gather_sorted(mine: list[Prediction]) -> list[Prediction] | None:
    """On rank 0 the predictions of all ranks, sorted by image id; None on the others."""
    shares = distributed.gather_objects(mine)
    return None if shares is None else sorted((p for share in shares for p in share), key=lambda p: p["image_id"])
