"""Loading one sample: seeded by its key, and with the file named if it cannot be read."""

from __future__ import annotations

from typing import Any

from engine.data.order import SampleKey
from engine.errors import DataError, first_line
from engine.randomness import SAMPLE, seed_all


class Unreadable:
    """A sample that could not be loaded. It travels instead of an exception, which a worker would wrap in a traceback."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load_sample(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # whatever a transform raises: the file is named and the run stops with it
        if isinstance(error, DataError):  # it says all there is to say
            return Unreadable(str(error))
        path = dataset.get_data_info(index)["img_path"]
        if isinstance(error, FileNotFoundError):
            return Unreadable(f"image {path} does not exist, though the annotation file lists it")
        # cv2 answers None for a broken file, and the loader trips over that.
        return Unreadable(f"image {path} cannot be loaded ({type(error).__name__}: {first_line(error)})")


class SeededDataset:
    """Samples by key: the augmentation of a sample depends on its key and the run's seed, not on who loads it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(self.seed, SAMPLE, key.epoch, key.position)
        return load_sample(self.dataset, key.index)
