"""The companion: a second gradient (signed, squared, or a plain copy), reduced in addition to DeepSpeed's own.

Micro-batch gradients fill two fixed buffers in turn, one bucket each. A full bucket is reduced to its owners
asynchronously, in a separate process group, while backward fills the other buffer. What this rank owns is added to its
companion partition. So the memory is one partition plus two buckets, for a model of any size.

The plan fixes the order of collectives, in whatever order gradients come. A bucket is launched only after those before
it, and at the latest when a gradient for the second bucket after it needs its buffer. A gradient missing by then counts
as zero. If it comes later in the same backward, it is kept and reduced at the end of the step (`reduce_late`). This
happens only if a graph runs in another order than the one the plan was made from. There is no deadlock: a rank that
waits for a bucket has launched it and all before it, so the rank that waits for the earliest one can always proceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.buckets import Plan, make_plan
from engine.zero.geometry import Geometry


class Lane:
    """One vector: the sum over ranks and micro-steps of weight * f(u), where f(u) is u or u^2."""

    def __init__(
        self, plan: Plan, *, squared: bool, dtype: torch.dtype, device: torch.device, once: bool = False
    ) -> None:
        self.squared = squared
        # Squares of 16-bit gradients would overflow or underflow.
        dtype = torch.float32 if squared else dtype
        # A single reduction (`once`) needs no more than the gradients' type; sums over micro-steps need fp32.
        self.partition = torch.zeros(plan.numel, dtype=dtype if once else torch.float32, device=device)
        size = max((bucket.numel for bucket in plan.buckets), default=0)
        self.buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
        self.outputs: list[Tensor] = []
        self.late: dict[int, Tensor] = {}


class Companion:
    """Lanes that are reduced together, bucket by bucket, to the ranks that own the parameters."""

    def __init__(
        self, geometry: Geometry, plan: Plan, group: Any, lanes: Sequence[Lane], fires: dict[int, int]
    ) -> None:
        self.geometry, self.plan, self.group, self.lanes, self.fires = geometry, plan, group, list(lanes), fires
        # gloo reduces faster segment by segment than by reduce_scatter (2^24 floats, 2 ranks: 0.07 s against 0.12 s).
        self.scatter = geometry.even and geometry.world > 1 and dist.get_backend(group) == "nccl"
        if self.scatter:
            for lane in self.lanes:
                lane.outputs = [buffer.new_empty(buffer.numel() // geometry.world) for buffer in lane.buffers]
        self.flying: list[tuple[int, list[Any]] | None] = [None, None]
        self.broken = False
        self.turn = 0  # buckets launched before this micro-step: buffers alternate over all of them
        self._begin()

    def _begin(self) -> None:
        self.next = 0
        self.opened: set[int] = set()
        self.came: list[dict[int, int]] = [{} for _ in self.plan.buckets]

    def put(self, i: int, weights: Sequence[float], *parts: Tensor) -> None:
        """Add the sum of `parts`, a gradient of parameter i at this micro-step; one weight per lane."""
        homes = self.plan.buckets_of[i]
        if homes[0] < self.next:
            return self._put_late(i, weights, *parts)
        flats = [part.detach().contiguous().view(-1) for part in parts]
        for b in homes:
            while b > self.next + 1:
                self._launch(weights)
            buffers = self._open(b)
            for block in self.plan.buckets[b].blocks[i]:
                for lane, weight, buffer in zip(self.lanes, weights, buffers):
                    for k, flat in enumerate(flats):
                        _place(
                            block.read(flat),
                            block.write(buffer),
                            1.0 if lane.squared else weight,
                            first=k == 0 and i not in self.came[b],
                        )
            self.came[b][i] = self.came[b].get(i, 0) + 1
        while self.next < len(self.plan.buckets) and self._complete(self.next):
            self._launch(weights)

    def _put_late(self, i: int, weights: Sequence[float], *parts: Tensor) -> None:
        total = reduce(torch.add, (part.detach().float() for part in parts)).reshape(-1)
        for lane, weight in zip(self.lanes, weights):
            # If a first part x of this micro-batch's gradient has been sent already, (x + y)^2 cannot be computed.
            self.broken |= lane.squared and any(i in came for came in self.came)
            share = (total.square() if lane.squared else total) * weight
            lane.late[i] = lane.late[i] + share if i in lane.late else share

    def _complete(self, b: int) -> bool:
        came = self.came[b]
        return all(came.get(i, 0) >= self.fires.get(i, 1) for i in self.plan.buckets[b].blocks)

    def _open(self, b: int) -> list[Tensor]:
        slot = (self.turn + b) % 2
        if b not in self.opened:
            self._land(slot)
            self.opened.add(b)
        return [lane.buffers[slot][: self.plan.buckets[b].numel] for lane in self.lanes]

    def _launch(self, weights: Sequence[float]) -> None:
        b = self.next
        bucket, slot, works = self.plan.buckets[b], (self.turn + b) % 2, []
        for lane, weight, buffer in zip(self.lanes, weights, self._open(b)):
            for i, blocks in bucket.blocks.items():
                if i not in self.came[b]:
                    for block in blocks:
                        block.write(buffer).zero_()
            if lane.squared:  # only now: it is the square of the sum of all parts
                buffer.square_().mul_(weight)
            works += self._reduce(bucket.segments, buffer, lane.outputs[slot] if self.scatter else None)
        self.flying[slot] = (b, works)
        self.next += 1

    def _reduce(self, segments: list[tuple[int, int, int]], buffer: Tensor, output: Tensor | None) -> list[Any]:
        if self.geometry.world == 1:
            return []
        if output is not None:
            return [dist.reduce_scatter_tensor(output[: segments[0][2]], buffer, group=self.group, async_op=True)]
        return [
            dist.reduce(buffer[start : start + length], group_dst=owner, group=self.group, async_op=True)
            for owner, start, length in segments
        ]

    def _land(self, slot: int) -> None:
        """Wait for the bucket in a buffer and add what this rank owns to its partition."""
        flying, self.flying[slot] = self.flying[slot], None
        if flying is None:
            return
        b, works = flying
        for work in works:
            work.wait()
        bucket = self.plan.buckets[b]
        for owner, start, length in bucket.segments:
            if owner == self.geometry.rank:
                for lane in self.lanes:
                    got = lane.outputs[slot][:length] if self.scatter else lane.buffers[slot][start : start + length]
                    lane.partition[bucket.home : bucket.home + length].add_(got)

    def end_micro_step(self, weights: Sequence[float]) -> None:
        """Launch the remaining buckets of this micro-step; a gradient that has not come counts as zero."""
        while self.next < len(self.plan.buckets):
            self._launch(weights)
        self.turn += len(self.plan.buckets)
        self._begin()

    def finish(self) -> None:
        """Wait for all buckets and free the buffers."""
        self._land(0)
        self._land(1)
        for lane in self.lanes:
            lane.buffers, lane.outputs = [], []

    def reduce_late(self, late: list[int], bucket_size: int) -> None:
        """Reduce the parameters whose gradient came too late on some rank, and add them to the partition."""
        if not late:
            return
        plan = make_plan(self.geometry, late, bucket_size)
        where: dict[int, list[tuple[int, int, int]]] = {}
        for fragment, start, stop, home in self.plan.spans:
            where.setdefault(fragment, []).append((start, stop, home))
        for lane in self.lanes:
            extra = Lane(plan, squared=False, dtype=torch.float32, device=lane.partition.device)
            companion = Companion(self.geometry, plan, self.group, [extra], {})
            for i in late:
                if i in lane.late:
                    companion.put(i, [1.0], lane.late.pop(i))
            companion.end_micro_step([1.0])
            companion.finish()
            for fragment, start, stop, home in plan.spans:
                for begin, end, target in where[fragment]:
                    low, high = max(start, begin), min(stop, end)
                    if low < high:
                        lane.partition[target + low - begin : target + high - begin].add_(
                            extra.partition[home + low - start : home + high - start]
                        )


def _place(source: Tensor, target: Tensor, weight: float, *, first: bool) -> None:
    """target = weight * source if it is the first, otherwise target += weight * source."""
    if not first:
        target.add_(source, alpha=weight)
    elif source.dtype == target.dtype:
        torch.mul(source, weight, out=target)  # one pass over memory instead of two
    else:
        target.copy_(source).mul_(weight)
