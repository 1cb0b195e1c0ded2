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


def collate(samples: Sequence[Any]) -> Any:
    """Lists of images and data samples, as mmdet's preprocessor expects them, or the first unreadable sample."""
    for sample in samples:
        if isinstance(sample, Unreadable):
            return sample
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _begin_worker(_: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    ignore_in_loader()


def training_loader(dataset: Any, seed: int, micro_batches: RankMicroBatches, *, workers: int) -> DataLoader:
    return DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=micro_batches,
        collate_fn=collate,
        num_workers=workers,
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


def readable(batches: DataLoader) -> Iterator[Any]:
    """The batches; DataError with the image's name if one cannot be loaded."""
    for batch in batches:
        if isinstance(batch, Unreadable):
            raise DataError(batch.reason)
        yield batch
