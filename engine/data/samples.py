"""Load one sample, seeded by its key; the file is named if it cannot be read."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from engine.data.order import SampleKey
from engine.errors import DataError, first_line
from engine.randomness import SAMPLE, seed_all


class Unreadable:
    """Stands for a sample that could not be loaded. A worker would wrap an exception in a traceback."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load_sample(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # a transform may raise anything: name the file
        if isinstance(error, DataError):
            return Unreadable(str(error))
        path = dataset.get_data_info(index)["img_path"]
        if isinstance(error, FileNotFoundError):
            return Unreadable(f"image {path} does not exist, though the annotation file lists it")
        # For a broken file cv2 returns None, on which the transforms fail.
        return Unreadable(f"image {path} cannot be loaded ({type(error).__name__}: {first_line(error)})")


class SeededDataset(Dataset):
    """Samples by key. Augmentation depends on the key and the run's seed, not on the process that loads the sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(self.seed, SAMPLE, key.epoch, key.position)
        return load_sample(self.dataset, key.image)
