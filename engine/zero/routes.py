"""How a full bucket reaches the ranks that own its segments.

Either all ranks send (`ToOwners`), or some of them do (`FromSome`): these reduce the bucket among themselves, one equal
slice each, and then hand every owner its pieces. Each way is one call of the backend, or one group of calls that it
launches together, whatever the number of owners. All ranks start the same collectives in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.buckets import Bucket
from engine.zero.geometry import Chunks, Geometry


class Flight(NamedTuple):
    """A bucket on its way: what to wait for, and where this rank's segment arrives."""

    works: Sequence[Any]
    received: Tensor


class Route(Protocol):
    sending: bool  # whether this rank contributes
    sign: float

    def scratch(self, numel: int) -> int:
        """Elements that it needs beside a buffer of `numel`."""
        ...

    def start(self, bucket: Bucket, buffer: Tensor, scratch: Tensor) -> Flight:
        """Send the bucket in `buffer`, which stays untouched until the flight has landed, as does `scratch`."""
        ...


def own_segment(bucket: Bucket, rank: int) -> tuple[int, int]:
    """Start and length of what this rank owns of a bucket."""
    return next(((start, length) for owner, start, length in bucket.segments if owner == rank), (0, 0))


class ToOwners:
    """All ranks send; every segment is reduced to its owner."""

    sending, sign = True, 1.0

    def __init__(self, geometry: Geometry, group: Any) -> None:
        self.geometry, self.group = geometry, group
        self.nccl = group is not None and dist.get_backend(group) == "nccl"
        self.scatters = self.nccl and isinstance(geometry, Chunks)  # whose segments are equal

    def scratch(self, numel: int) -> int:
        return -(-numel // self.geometry.world) if self.scatters else 0

    def start(self, bucket: Bucket, buffer: Tensor, scratch: Tensor) -> Flight:
        start, length = own_segment(bucket, self.geometry.rank)
        received = buffer[start : start + length]
        if self.geometry.world == 1:
            return Flight([], received)
        if self.scatters:
            received = scratch[:length]
            scattered = dist.reduce_scatter_tensor(received, buffer[: bucket.numel], group=self.group, async_op=True)
            return Flight([scattered], received)
        if not self.nccl:
            # gloo reduces faster piece by piece than by reduce_scatter (2^24 floats, 2 ranks: 0.10 s against 0.29 s).
            return Flight(_reduce_pieces(buffer, bucket.segments, self.group), received)
        with dist._coalescing_manager(group=self.group, device=buffer.device, async_ops=True) as together:
            _reduce_pieces(buffer, bucket.segments, self.group)
        return Flight([together], received)


class FromSome:
    """The ranks `senders` send. `among` is their process group, `sign` a factor on what they send."""

    def __init__(self, geometry: Geometry, group: Any, *, senders: range, among: Any, sign: float) -> None:
        self.geometry, self.group, self.senders, self.among, self.sign = geometry, group, senders, among, sign
        self.sending = geometry.rank in senders
        self.nccl = dist.get_backend(group) == "nccl"
        self.stream: Any = None

    def scratch(self, numel: int) -> int:
        return numel

    def start(self, bucket: Bucket, buffer: Tensor, scratch: Tensor) -> Flight:
        with self._aside(buffer.device):
            mine, free = buffer[:0], scratch
            if self.sending:
                mine, free = self._reduced_slice(bucket, buffer, scratch)
            rank = self.geometry.rank
            slices = self.slices(bucket)
            owned = own_segment(bucket, rank)
            sent = [0] * self.geometry.world
            if self.sending:
                for owner, start, length in bucket.segments:
                    sent[owner] = _overlap(slices[rank - self.senders.start], (start, length))
            got = [
                _overlap(slices[r - self.senders.start], owned) if r in self.senders else 0
                for r in range(self.geometry.world)
            ]
            received = free[: owned[1]]
            work = self._exchange(received, mine, got, sent)
        return Flight([work], received)

    def slices(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Start and length of the slice of each sender."""
        width = -(-bucket.numel // len(self.senders))
        starts = [min(k * width, bucket.numel) for k in range(len(self.senders) + 1)]
        return [(a, b - a) for a, b in zip(starts, starts[1:])]

    def _reduced_slice(self, bucket: Bucket, buffer: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """This sender's slice, summed over the senders, and the tensor that is free to receive into."""
        k, senders = self.geometry.rank - self.senders.start, len(self.senders)
        start, length = self.slices(bucket)[k]
        if senders == 1:
            return buffer[start : start + length], scratch
        if not self.nccl:
            pieces = [(k, a, n) for k, (a, n) in enumerate(self.slices(bucket)) if n]
            for work in _reduce_pieces(buffer, pieces, self.among):
                work.wait()
            return buffer[start : start + length], scratch
        width = -(-bucket.numel // senders)
        summed = scratch[:width]
        work = dist.reduce_scatter_tensor(summed, buffer[: width * senders], group=self.among, async_op=True)
        assert work is not None  # this rank is a member of the group
        work.wait()
        return summed[:length], buffer

    def _exchange(self, received: Tensor, sent: Tensor, got_sizes: list[int], sent_sizes: list[int]) -> Any:
        if not self.nccl:  # gloo moves bytes: it has no all-to-all of bf16
            size = sent.element_size()
            received, sent = received.view(torch.uint8), sent.view(torch.uint8)
            got_sizes, sent_sizes = [size * n for n in got_sizes], [size * n for n in sent_sizes]
        return dist.all_to_all_single(received, sent, got_sizes, sent_sizes, group=self.group, async_op=True)

    @contextlib.contextmanager
    def _aside(self, device: torch.device) -> Any:
        """On a GPU, wait for the first of the two collectives on a stream of its own, not on that of backward."""
        if device.type == "cpu" or device.type == "meta":
            yield
            return
        from deepspeed.accelerator import get_accelerator  # importing DeepSpeed takes seconds

        accelerator = get_accelerator()
        self.stream = self.stream or accelerator.Stream()
        self.stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self.stream):
            yield


def _reduce_pieces(buffer: Tensor, pieces: Sequence[tuple[int, int, int]], group: Any) -> list[Any]:
    return [
        dist.reduce(buffer[start : start + length], group_dst=owner, group=group, async_op=True)
        for owner, start, length in pieces
    ]


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    """How many elements two ranges (start, length) share."""
    return max(0, min(first[0] + first[1], second[0] + second[1]) - max(first[0], second[0]))
