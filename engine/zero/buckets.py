"""A fixed plan of buckets, by which gradients are reduced to the ranks that own them.

A bucket holds pieces of several parameters, sorted by owner: one segment per owner, so that every rank gets exactly its
own ranges (`routes.py`). A parameter larger than a bucket is split over several. Every rank makes the same plan.

A rank adds what it receives to a partition: a vector of all elements that it owns, fragment after fragment, in the
order of the optimizer's shards. `runs` says which range of a segment belongs where in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from engine.zero.geometry import Chunks, Geometry


class Block(NamedTuple):
    """A block of rows x width elements: where it is in the flattened parameter and where in the bucket."""

    rows: int
    width: int
    source: int
    source_stride: int
    target: int
    target_stride: int

    def read(self, flat: Tensor) -> Tensor:
        return flat.as_strided((self.rows, self.width), (self.source_stride, 1), flat.storage_offset() + self.source)

    def write(self, bucket: Tensor) -> Tensor:
        return bucket.as_strided(
            (self.rows, self.width), (self.target_stride, 1), bucket.storage_offset() + self.target
        )


class Span(NamedTuple):
    """Elements [start, stop) of a fragment of this rank, which begin at `offset` in its segment of a bucket."""

    fragment: int
    start: int
    stop: int
    offset: int


class Run(NamedTuple):
    """`length` elements of this rank's segment, from `offset` on, which begin at `home` in the partition."""

    offset: int
    home: int
    length: int


@dataclass
class Bucket:
    numel: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list)  # (owner, start, length)
    blocks: dict[int, list[Block]] = field(default_factory=dict)  # by parameter
    spans: list[Span] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)


@dataclass
class Plan:
    buckets: list[Bucket]
    order: dict[int, int]  # the place of each parameter
    buckets_of: dict[int, list[int]]
    homes: list[int]  # where each fragment begins in the partition
    numel: int  # of the partition


def make_plan(geometry: Geometry, order: Sequence[int], bucket_size: int) -> Plan:
    """Buckets for the parameters `order`, in that order.

    A bucket has at most half of `bucket_size` elements (and at least one for each rank): the other half is for what a
    rank receives while it sends.
    """
    homes = [0, *accumulate(f.stop - f.start for f in geometry.fragments)]
    plan = Plan([], {i: place for place, i in enumerate(order)}, {}, homes[:-1], homes[-1])
    fragment_of = {(f.param, f.start): k for k, f in enumerate(geometry.fragments)}
    cut = _even if isinstance(geometry, Chunks) else _contiguous
    for bucket in cut(geometry, order, max(1, bucket_size // 2), fragment_of):
        bucket.runs = _runs(bucket.spans, homes)
        for param in bucket.blocks:
            plan.buckets_of.setdefault(param, []).append(len(plan.buckets))
        plan.buckets.append(bucket)
    return plan


def _runs(spans: Sequence[Span], homes: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    for fragment, start, stop, offset in spans:
        run = Run(offset, homes[fragment] + start, stop - start)
        last = runs[-1] if runs else None
        if last is not None and (last.offset + last.length, last.home + last.length) == (run.offset, run.home):
            runs[-1] = last._replace(length=last.length + run.length)
        else:
            runs.append(run)
    return runs


def _fit(sizes: Sequence[tuple], capacity: int) -> Iterator[list[tuple]]:
    """Cut (..., start, stop) ranges into batches of at most `capacity` elements."""
    batch, room = [], capacity
    for *label, start, stop in sizes:
        while start < stop:
            take = min(room, stop - start)
            batch.append((*label, start, start + take))
            start, room = start + take, room - take
            if room == 0:
                yield batch
                batch, room = [], capacity
    if batch:
        yield batch


def _even(geometry: Any, order: Sequence[int], capacity: int, fragment_of: dict) -> Iterator[Bucket]:
    # A bucket is a matrix with one row per rank.
    columns = max(1, capacity // geometry.world)
    for batch in _fit([(i, 0, geometry.chunk(i)) for i in order], columns):
        width = sum(stop - start for _, start, stop in batch)
        bucket = Bucket(geometry.world * width, segments=[(r, r * width, width) for r in range(geometry.world)])
        column = 0
        for i, start, stop in batch:
            chunk, size = geometry.chunk(i), geometry.numels[i]
            rows, rest = divmod(size, chunk)
            blocks = [Block(rows, stop - start, start, chunk, column, width)]
            if rest > start:
                blocks.append(
                    Block(1, min(stop, rest) - start, rows * chunk + start, chunk, rows * width + column, width)
                )
            bucket.blocks.setdefault(i, []).extend(blocks)
            owned = min(stop, size - geometry.rank * chunk)
            if owned > start:
                bucket.spans.append(Span(fragment_of[i, geometry.rank * chunk], start, owned, column))
            column += stop - start
        yield bucket


def _contiguous(geometry: Geometry, order: Sequence[int], capacity: int, fragment_of: dict) -> Iterator[Bucket]:
    ranges = [(i, rank, start, start, stop) for i in order for rank, start, stop in geometry.ranges(i)]
    for batch in _fit(ranges, capacity):
        batch.sort(key=lambda piece: piece[1])
        bucket, position = Bucket(sum(stop - start for *_, start, stop in batch)), 0
        for i, rank, first, start, stop in batch:
            if not bucket.segments or bucket.segments[-1][0] != rank:
                bucket.segments.append((rank, position, 0))
            owner, begin, length = bucket.segments[-1]
            bucket.segments[-1] = (owner, begin, length + stop - start)
            bucket.blocks.setdefault(i, []).append(Block(1, stop - start, start, stop - start, position, stop - start))
            if rank == geometry.rank:
                bucket.spans.append(Span(fragment_of[i, first], start - first, stop - first, position - begin))
            position += stop - start
        yield bucket
