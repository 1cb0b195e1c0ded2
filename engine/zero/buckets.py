"""A fixed plan of buckets, by which gradients are reduced to the ranks that own them.

A bucket holds pieces of several parameters, sorted by owner: one segment per owner. Each segment is reduced to its
owner (or one reduce-scatter does it, if all segments have the same size), so that every rank gets exactly its own
ranges. A parameter larger than a bucket is split over several. Every rank makes the same plan. A rank stores what it
receives in its companion partition, bucket after bucket; `spans` says which piece of which fragment is where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """Elements [start, stop) of a fragment of this rank; they begin at `home` in the companion partition."""

    fragment: int
    start: int
    stop: int
    home: int


@dataclass
class Bucket:
    numel: int = 0
    home: int = 0
    segments: list[tuple[int, int, int]] = field(default_factory=list)  # (owner, start, length)
    blocks: dict[int, list[Block]] = field(default_factory=dict)  # by parameter


@dataclass
class Plan:
    buckets: list[Bucket]
    spans: list[Span]
    numel: int
    buckets_of: dict[int, list[int]]


def make_plan(geometry: Geometry, order: Sequence[int], bucket_size: int) -> Plan:
    """Buckets of at most `bucket_size` elements for the parameters `order`, in that order."""
    fragment_of = {(f.param, f.start): k for k, f in enumerate(geometry.fragments)}
    plan = Plan([], [], 0, {})
    if isinstance(geometry, Chunks):
        buckets = _even(geometry, order, bucket_size, fragment_of)
    else:
        buckets = _contiguous(geometry, order, bucket_size, fragment_of)
    for bucket, spans in buckets:
        bucket.home = plan.numel
        plan.spans += [span._replace(home=plan.numel + span.home) for span in spans]
        plan.numel += sum(length for rank, _, length in bucket.segments if rank == geometry.rank)
        for param in bucket.blocks:
            plan.buckets_of.setdefault(param, []).append(len(plan.buckets))
        plan.buckets.append(bucket)
    return plan


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


def _even(geometry: Chunks, order: Sequence[int], bucket_size: int, fragment_of: dict) -> Iterator:
    # A bucket is a matrix with one row per rank; a reduce-scatter needs one more row for its output.
    columns = max(1, bucket_size // (geometry.world + (geometry.world > 1)))
    for batch in _fit([(i, 0, geometry.chunk(i)) for i in order], columns):
        width = sum(stop - start for _, start, stop in batch)
        bucket = Bucket(geometry.world * width, segments=[(r, r * width, width) for r in range(geometry.world)])
        spans, column = [], 0
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
                spans.append(Span(fragment_of[i, geometry.rank * chunk], start, owned, column))
            column += stop - start
        yield bucket, spans


def _contiguous(geometry: Geometry, order: Sequence[int], bucket_size: int, fragment_of: dict) -> Iterator:
    ranges = [(i, rank, start, start, stop) for i in order for rank, start, stop in geometry.ranges(i)]
    for batch in _fit(ranges, bucket_size):
        batch.sort(key=lambda piece: piece[1])
        bucket, spans, position = Bucket(sum(stop - start for *_, start, stop in batch)), [], 0
        for i, rank, first, start, stop in batch:
            if not bucket.segments or bucket.segments[-1][0] != rank:
                bucket.segments.append((rank, position, 0))
            owner, begin, length = bucket.segments[-1]
            bucket.segments[-1] = (owner, begin, length + stop - start)
            bucket.blocks.setdefault(i, []).append(Block(1, stop - start, start, stop - start, position, stop - start))
            if rank == geometry.rank:
                spans.append(Span(fragment_of[i, first], start - first, stop - first, position - begin))
            position += stop - start
        yield bucket, spans
