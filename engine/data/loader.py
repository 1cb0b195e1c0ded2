"""Loaders for a rank's share of the data: micro-batches in training, every image exactly once in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import torch
from torch.utils.data import DataLoader, Dataset

from engine.data.order import RankMicroBatches
from engine.data.samples import SeededDataset, Unreadable, load_sample
from engine.errors import DataError
from engine.preemption import ignore_in_loader


class BrokenBatch(Unreadable):
    """Stands for a batch with samples that could not be loaded. `rest` are the others, None if there are none."""

    def __init__(self, reasons: list[str], rest: Any) -> None:
        super().__init__(reasons[0])
        self.reasons, self.rest = reasons, rest


def collate(samples: Sequence[Any]) -> Any:
    """Lists of images and data samples, as mmdet's preprocessor expects them."""
    reasons = [sample.reason for sample in samples if isinstance(sample, Unreadable)]
    loaded = [sample for sample in samples if not isinstance(sample, Unreadable)]
    batch = {key: [sample[key] for sample in loaded] for key in loaded[0]} if loaded else None
    return BrokenBatch(reasons, batch) if reasons else batch


def _begin_worker(_: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    ignore_in_loader()


def training_loader(
    dataset: Any, seed: int, micro_batches: RankMicroBatches, *, workers: int, pinned: bool = False
) -> DataLoader:
    """All micro-batches of a run in one pass, so that its processes live as long as the run. `pinned`: in memory from
    which an accelerator copies while it computes."""
    return DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=micro_batches,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pinned,
        worker_init_fn=_begin_worker,
    )


class _Share(Dataset):
    """Images rank, rank + world, ... of a data set."""

    def __init__(self, dataset: Any, rank: int, world: int) -> None:
        self.dataset, self.indices = dataset, range(rank, len(dataset), world)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> Any:
        return load_sample(self.dataset, self.indices[place])


def evaluation_loader(dataset: Any, *, rank: int, world: int, batch: int, workers: int) -> DataLoader:
    """Batches of a rank's share: every image of the data set is on exactly one rank."""
    share = _Share(dataset, rank, world)
    return DataLoader(share, batch_size=batch, collate_fn=collate, num_workers=workers, worker_init_fn=_begin_worker)


def readable(batches: DataLoader, unreadable: list[str] | None = None) -> Iterator[Any]:
    """The batches. An image that cannot be loaded is a DataError with its name, or, if there is a list for the
    reasons, left out of its batch."""
    for batch in batches:
        if isinstance(batch, BrokenBatch):
            if unreadable is None:
                raise DataError(batch.reason)
            unreadable += batch.reasons
            batch = batch.rest
        if batch is not None:
            yield batch
