"""Loaders over a rank's share: micro-batches while training, every image exactly once in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Subset

from engine.data.order import RankMicroBatches
from engine.data.samples import SeededDataset, Unreadable, load_sample
from engine.errors import DataError
from engine.preemption import ignore_in_loader


def collate(samples: Sequence[Any]) -> Any:
    """Lists of images and data samples, as mmdet's preprocessor takes them; the first unreadable sample stands for all."""
    for sample in samples:
        if isinstance(sample, Unreadable):
            return sample
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def _begin_worker(_: int) -> None:
    import cv2
    import torch

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


class _ByIndex:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return load_sample(self.dataset, index)


def evaluation_loader(dataset: Any, *, rank: int, world: int, batch: int, workers: int) -> DataLoader:
    """Images rank, rank + world, ...: each of the data set is on exactly one rank."""
    share = Subset(_ByIndex(dataset), range(rank, len(dataset), world))
    return DataLoader(share, batch_size=batch, collate_fn=collate, num_workers=workers, worker_init_fn=_begin_worker)


def readable(batches: DataLoader) -> Iterator[Any]:
    """The batches, or a DataError that names the image."""
    for batch in batches:
        if isinstance(batch, Unreadable):
            raise DataError(batch.reason)
        yield batch
