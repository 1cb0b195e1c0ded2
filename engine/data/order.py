"""Which samples form which micro-batch. This depends on the seed and the batch size only, not on ranks or workers.

Epoch e is a permutation of the data set drawn from (seed, e). It is split into ceil(size / batch) global batches; the
last one is filled up with the epoch's first samples. Micro-batch j = k N + r of a global batch (accumulation step k on
rank r of N) is its j-th slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.config.batch import BatchPlan
from engine.randomness import ORDER


class SampleKey(NamedTuple):
    """One sample of the run. Its random numbers depend on its `position` in the epoch, so repeated images differ."""

    epoch: int
    position: int
    image: int  # index in the data set


class GlobalBatches:
    """`batches[step]` is the global batch of an optimizer step, counted from 0 over the whole run.

    With `landscape` (a flag per image), micro-batches of `micro` images get images of like orientation.
    """

    def __init__(
        self, *, size: int, batch: int, seed: int, micro: int = 1, landscape: Sequence[bool] | None = None
    ) -> None:
        self.size, self.batch, self.seed, self.micro = size, batch, seed, micro
        self.steps_per_epoch = math.ceil(size / batch)
        self._landscape = landscape
        self._epoch = -1
        self._permutation: np.ndarray = np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> list[SampleKey]:
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self.seed, ORDER, epoch)).permutation(self.size)
            self._epoch = epoch
        positions = range(within * self.batch, (within + 1) * self.batch)
        keys = [SampleKey(epoch, p, int(self._permutation[p % self.size])) for p in positions]
        landscape = self._landscape
        if landscape is not None:
            keys.sort(key=lambda key: landscape[key.image])  # stable; the global batch stays the same
            # Alternately to the first and the second half of the batch: AGVM compares them, so they must be alike.
            groups = [keys[i : i + self.micro] for i in range(0, len(keys), self.micro)]
            keys = [key for group in groups[0::2] + groups[1::2] for key in group]
        return keys


class RankMicroBatches:
    """The micro-batches of one rank, in order, from one optimizer step to another."""

    def __init__(self, batches: GlobalBatches, plan: BatchPlan, *, rank: int, start: int, stop: int) -> None:
        self.batches, self.plan, self.rank, self.start, self.stop = batches, plan, rank, start, stop

    def __len__(self) -> int:
        return (self.stop - self.start) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        micro = self.plan.micro
        for step in range(self.start, self.stop):
            keys = self.batches[step]
            for k in range(self.plan.accumulation):
                j = k * self.plan.world + self.rank
                yield keys[j * micro : (j + 1) * micro]
