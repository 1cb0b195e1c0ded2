"""Which rank owns which range of every parameter: pure arithmetic on sizes, without tensors or a DeepSpeed engine.

Parameters are numbered in the order of their shards. The layouts of a running engine (`engine.zero.layout`) and the
planner use the same classes. Read off DeepSpeed 0.19.8:

- stage 0: every rank holds everything; for AGVM's sums each takes a chunk of ceil(numel / N) of each parameter;
- stages 1 and 2: the parameters of a param group lie end to end in one flat tensor, which is padded to a multiple of
  2 N and cut into N equal partitions;
- stage 3: every parameter is cut into N chunks of ceil(numel / N), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from engine.errors import ConfigError

_START_ALIGNMENT = 2  # elements: DeepSpeed's nccl_start_alignment_factor
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Fragment:
    """A range of a flattened parameter that this rank owns, and where it sits in its optimizer shard."""

    param: int
    start: int
    stop: int
    shard: int
    offset: int


class Place(NamedTuple):
    """A range of a parameter as one rank keeps it: in which shard of its, and from which element on."""

    rank: int
    shard: int
    offset: int
    start: int
    stop: int


class Geometry(ABC):
    """The ranges of all ranks, and the fragments of one of them."""

    def __init__(self, numels: Sequence[int], world: int, rank: int) -> None:
        self.numels, self.world, self.rank = list(numels), world, rank

    @abstractmethod
    def ranges(self, i: int) -> list[tuple[int, int, int]]:
        """(owner, start, stop) in ascending order, covering parameter i."""

    @abstractmethod
    def place(self, i: int, start: int) -> tuple[int, int]:
        """Shard index, and offset in it, of a range that this rank owns."""

    @abstractmethod
    def places(self, i: int, start: int, stop: int) -> list[Place]:
        """Where any ranks keep the range [start, stop) of parameter i, ascending. Only its keepers are looked at."""

    @abstractmethod
    def shard_sizes(self) -> list[int]:
        """The elements of each shard of a rank, padding included."""

    @abstractmethod
    def padding(self) -> int:
        """Elements over all ranks that belong to no parameter."""

    @cached_property
    def fragments(self) -> list[Fragment]:
        """The ranges that this rank owns."""
        return [
            Fragment(i, start, stop, *self.place(i, start))
            for i in range(len(self.numels))
            for rank, start, stop in self.ranges(i)
            if rank == self.rank
        ]

    def held(self) -> list[Fragment]:
        """The ranges whose master weights and optimizer state this rank keeps."""
        return self.fragments


class Chunks(Geometry):
    """Stage 3: `homes` are the sub-group, and the offset in it, of this rank's chunk of each parameter."""

    def __init__(self, numels: Sequence[int], world: int, rank: int, homes: Sequence[tuple[int, int]]) -> None:
        super().__init__(numels, world, rank)
        self.homes = list(homes)

    def chunk(self, i: int) -> int:
        return math.ceil(self.numels[i] / self.world)

    def ranges(self, i: int) -> list[tuple[int, int, int]]:
        size, chunk = self.numels[i], self.chunk(i)
        return [(r, r * chunk, min(size, (r + 1) * chunk)) for r in range(self.world) if r * chunk < size]

    def place(self, i: int, start: int) -> tuple[int, int]:
        return self.homes[i]

    def places(self, i: int, start: int, stop: int) -> list[Place]:
        size, chunk, (shard, offset) = self.numels[i], self.chunk(i), self.homes[i]
        keepers = range(start // chunk, (stop - 1) // chunk + 1) if start < stop else range(0)
        return [Place(r, shard, offset, r * chunk, min(size, (r + 1) * chunk)) for r in keepers]

    def shard_sizes(self) -> list[int]:
        sizes = [0] * (1 + max((shard for shard, _ in self.homes), default=-1))
        for i, (shard, _) in enumerate(self.homes):
            sizes[shard] += self.chunk(i)
        return sizes

    def padding(self) -> int:
        return sum(self.chunk(i) * self.world - numel for i, numel in enumerate(self.numels))


class Replicas(Chunks):
    """Stage 0: a shard is a parameter, and every rank keeps all of them. The chunks are for AGVM's sums."""

    def __init__(self, numels: Sequence[int], world: int, rank: int) -> None:
        super().__init__(numels, world, rank, homes=[(i, 0) for i in range(len(numels))])

    def place(self, i: int, start: int) -> tuple[int, int]:
        return i, start

    def places(self, i: int, start: int, stop: int) -> list[Place]:
        return [Place(0, i, 0, 0, self.numels[i])] if start < stop else []

    def shard_sizes(self) -> list[int]:
        return self.numels

    def padding(self) -> int:
        return 0

    def held(self) -> list[Fragment]:
        return [Fragment(i, 0, numel, i, 0) for i, numel in enumerate(self.numels)]


class Partitions(Geometry):
    """Stages 1 and 2: `groups` and `positions` say where each parameter begins in its flat param group, `sizes` are the
    elements of each group that one rank owns."""

    def __init__(
        self,
        numels: Sequence[int],
        world: int,
        rank: int,
        *,
        groups: Sequence[int],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        super().__init__(numels, world, rank)
        self.groups, self.positions, self.sizes = list(groups), list(positions), list(sizes)

    def ranges(self, i: int) -> list[tuple[int, int, int]]:
        size, first = self.sizes[self.groups[i]], self.positions[i]
        last = first + self.numels[i]
        return [
            (r, max(first, r * size) - first, min(last, (r + 1) * size) - first)
            for r in range(first // size, (last - 1) // size + 1)
        ]

    def places(self, i: int, start: int, stop: int) -> list[Place]:
        group, first = self.groups[i], self.positions[i]
        size, last = self.sizes[group], first + self.numels[i]
        keepers = range((first + start) // size, (first + stop - 1) // size + 1) if start < stop else range(0)
        places = []
        for r in keepers:
            low, high = max(first, r * size), min(last, (r + 1) * size)
            places.append(Place(r, group, low - r * size, low - first, high - first))
        return places

    def place(self, i: int, start: int) -> tuple[int, int]:
        return self.groups[i], self.positions[i] + start - self.rank * self.sizes[self.groups[i]]

    def shard_sizes(self) -> list[int]:
        return self.sizes

    def padding(self) -> int:
        return sum(self.sizes) * self.world - sum(self.numels)


@dataclass(frozen=True)
class Sharding:
    """The settings that decide where shards lie."""

    stage: int
    world: int
    dtype: str = "float32"
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    sub_group_size: int = 10**9

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if isinstance(self.world, bool) or not isinstance(self.world, int) or self.world < 1:
            raise ConfigError(f"the number of ranks must be a whole number >= 1, got {self.world!r}")

    def order(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """The parameters of all param groups in the order of their shards."""
        if self.round_robin_gradients and self.stage in (1, 2):
            groups = [
                [i for first in range(min(self.world, len(group))) for i in group[first :: self.world]]
                for group in groups
            ]
        return [i for group in groups for i in group]

    def geometry(self, numels: Sequence[int], groups: Sequence[int], rank: int = 0) -> Geometry:
        """Of parameters in the order of their shards; `groups` are their param groups, numbered from 0."""
        if self.stage == 0:
            return Replicas(numels, self.world, rank)
        return self._chunks(numels, groups, rank) if self.stage == 3 else self._partitions(numels, groups, rank)

    def _chunks(self, numels: Sequence[int], groups: Sequence[int], rank: int) -> Chunks:
        homes: list[tuple[int, int]] = []
        shard, offset = -1, 0
        for i, (numel, group) in enumerate(zip(numels, groups)):
            if i == 0 or group != groups[i - 1] or offset >= self.sub_group_size:
                shard, offset = shard + 1, 0
            homes.append((shard, offset))
            offset += math.ceil(numel / self.world)
        return Chunks(numels, self.world, rank, homes)

    def _partitions(self, numels: Sequence[int], groups: Sequence[int], rank: int) -> Partitions:
        size = BYTES[self.dtype]
        alignment = 16 // math.gcd(16, size) if self.parameter_alignment else 1
        positions: list[int] = []
        filled: dict[int, int] = {}
        for numel, group in zip(numels, groups):
            start = filled.get(group, 0)
            start += -start % alignment
            positions.append(start)
            filled[group] = start + numel
        whole = _START_ALIGNMENT * self.world
        sizes = [math.ceil(filled[group] / whole) * whole // self.world for group in sorted(filled)]
        return Partitions(numels, self.world, rank, groups=groups, positions=positions, sizes=sizes)
