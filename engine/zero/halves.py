"""The two halves of a global batch that AGVM compares, and how a window gets the first half's share of the gradient.

Micro-batch j = k N + r of the R = N K of an optimizer step is computed by rank r at micro-step k. The first half are
the n1 = ceil(R / 2) micro-batches with j < R / 2, the second half the other n2. With u[j] their gradients and the
weights w1 = R / (2 n1), w2 = R / (2 n2) (both 1 if the halves are equal),

    g = (1/R) sum of all u[j]                                    DeepSpeed's own gradient
    s = (1/R) sum of the first half's u[j]                       the share
    d = (G1 - G2) / 2 = (w1 + w2) s - w2 g                       what AGVM needs beside g

If K is even, the halves are the first and the last K / 2 micro-steps. If K is odd, they meet in the middle micro-step,
where the first ceil(N / 2) ranks belong to the first half.

- DeepSpeed reduces every micro-step (ZeRO-2 and 3): copy this rank's partition after the last micro-step that belongs
  to the first half as a whole. Nothing is sent, except, if K is odd, the middle micro-step's gradients of the first
  ranks.
- DeepSpeed keeps the local sum (stages 0 and 1): one reduction of the local sums, in the micro-step where the halves
  meet.
- K = 1: the halves are halves of the ranks. For one half of the buckets the first ranks send their gradients, for the
  other half the second ranks send theirs, so that every rank sends half of the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Halves:
    world: int
    accumulation: int
    keeps_local: bool  # whether DeepSpeed keeps the local sum until the last micro-step

    @property
    def total(self) -> int:
        return self.world * self.accumulation

    @property
    def sizes(self) -> tuple[int, int]:
        """n1 and n2."""
        return (self.total + 1) // 2, self.total // 2

    def in_first(self, micro_step: int, rank: int) -> bool:
        return micro_step * self.world + rank < self.sizes[0]

    @property
    def _whole_steps(self) -> int:
        """Micro-steps that belong to the first half on all ranks."""
        return self.sizes[0] // self.world

    @property
    def _rest(self) -> int:
        """Ranks whose next micro-step belongs to the first half."""
        return self.sizes[0] % self.world

    @property
    def copied_after(self) -> int | None:
        """The micro-step after which DeepSpeed's reduced gradient is copied."""
        return self._whole_steps - 1 if self._whole_steps and not self.keeps_local else None

    @property
    def reduced_at(self) -> int | None:
        """The micro-step in which a second gradient is reduced."""
        if self._rest:
            return self._whole_steps
        return self._whole_steps - 1 if self.keeps_local else None

    @property
    def senders(self) -> list[range]:
        """Who sends in that micro-step: all ranks, the first ones, or the first and the second ones by turns."""
        if self.keeps_local and self._whole_steps:
            return [range(self.world)]
        first, second = range(self._rest), range(self._rest, self.world)
        return [first, second] if self.accumulation == 1 else [first]

    def adds_current(self, rank: int) -> bool:
        """Whether a sender's current gradient, and not only its local sum, belongs to what it sends."""
        return self._rest == 0 or rank < self._rest or self.accumulation == 1

    @property
    def sends_local_sum(self) -> bool:
        return self.keeps_local and self._whole_steps > 0

    def coefficients(self, side: int) -> tuple[float, float]:
        """(x, y) with d = x t + y g. On side 0, t is s; on side 1, it is minus the second half's share."""
        n1, n2 = self.sizes
        w1, w2 = self.total / (2 * n1), self.total / (2 * n2)
        return w1 + w2, w1 if side else -w2
