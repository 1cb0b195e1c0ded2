"""The companion: a second gradient, reduced in addition to DeepSpeed's own and bucket by bucket.

Gradients fill two fixed buffers in turn, one bucket each. A full bucket is sent to its owners asynchronously, in a
separate process group, while backward fills the other buffer. What this rank owns is added to its partition. So the
memory is one partition plus two buckets, for a model of any size.

The plan fixes the order of collectives, in whatever order gradients come. A bucket is launched only after those before
it, and at the latest when a gradient for the second bucket after it needs its buffer. A gradient missing by then counts
as zero. If it comes later in the same backward, it is kept and reduced at the end of the step (`reduce_late`). This
happens only if a graph runs in another order than the one the plan was made from. There is no deadlock: a rank that
waits for a bucket has launched it and all before it, so the rank that waits for the earliest one can always proceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.zero.buckets import Block, Plan, make_plan
from engine.zero.geometry import Geometry
from engine.zero.routes import Flight, Route, ToOwners


class Contribution(NamedTuple):
    """What a lane gets of a parameter's gradient: weight * (sum of parts), or in a lane of squares its square."""

    weight: float
    parts: Sequence[Tensor]


class Lane:
    """One vector, the sum of all contributions, of which this rank keeps its `partition`.

    With two routes, buckets take them by turns. A lane of squares adds `squares` * x^2 for each contribution x.
    """

    def __init__(
        self,
        plan: Plan,
        partition: Tensor,
        routes: Sequence[Route],
        *,
        dtype: torch.dtype,
        squares: float | None = None,
    ) -> None:
        self.partition, self.routes, self.squares = partition, routes, squares
        self.dtype = dtype if squares is None else torch.float32  # 16-bit squares would overflow or underflow
        self.size = max((bucket.numel for bucket in plan.buckets), default=0)
        self.buffers: list[Tensor] = []
        self.scratch: list[Tensor] = []
        self.late: dict[int, Tensor] = {}

    def allocate(self, geometry: Geometry, device: torch.device) -> None:
        """The buffers, on first use."""
        if not self.buffers:
            size = self.size + geometry.world  # a reduce-scatter needs a whole number of equal slices
            self.buffers = [torch.empty(size, dtype=self.dtype, device=device) for _ in range(2)]
            extra = max(route.scratch(size) for route in self.routes)
            self.scratch = [torch.empty(extra, dtype=self.dtype, device=device) for _ in range(2)]

    def route(self, bucket: int) -> Route:
        return self.routes[bucket % len(self.routes)]


class Companion:
    """Lanes that are reduced together, bucket by bucket, to the ranks that own the parameters.

    `begin(lanes)` starts a micro-step with the lanes that take part in it, the same ones on all ranks.
    """

    def __init__(self, geometry: Geometry, plan: Plan, group: Any, device: torch.device, fires: dict[int, int]) -> None:
        self.geometry, self.plan, self.group, self.device, self.fires = geometry, plan, group, device, fires
        self.flying: list[tuple[int, list[tuple[Lane, Flight]]] | None] = [None, None]
        self.broken = False
        self.turn = 0  # buckets launched before this micro-step: buffers alternate over all of them
        self.all_lanes: list[Lane] = []
        self.begin([])

    def begin(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.allocate(self.geometry, self.device)
            if lane not in self.all_lanes:
                self.all_lanes.append(lane)
        self.lanes = list(lanes)
        self.next = 0
        self.opened: set[int] = set()
        self.came: list[dict[int, int]] = [{} for _ in self.plan.buckets] if lanes else []

    def put(self, i: int, contributions: Sequence[Contribution | None]) -> None:
        """Add a gradient of parameter i at this micro-step: one contribution per lane, None if this rank has none."""
        homes = self.plan.buckets_of[i]
        if homes[0] < self.next:
            return self._put_late(i, contributions)
        flats: dict[int, Tensor] = {}
        for b in homes:
            while b > self.next + 1:
                self._launch()
            for lane, buffer, contribution in zip(self.lanes, self._open(b), contributions):
                route, blocks = lane.route(b), self.plan.buckets[b].blocks[i]
                if not route.sending:
                    continue
                if contribution is None:
                    if i not in self.came[b]:
                        _clear(blocks, buffer)
                    continue
                weight = contribution.weight * route.sign if lane.squares is None else 1.0
                for k, part in enumerate(contribution.parts):
                    if id(part) not in flats:
                        flats[id(part)] = part.detach().contiguous().view(-1)
                    first = k == 0 and i not in self.came[b]
                    for block in blocks:
                        _place(block.read(flats[id(part)]), block.write(buffer), weight, first=first)
            self.came[b][i] = self.came[b].get(i, 0) + 1
        while self.next < len(self.plan.buckets) and self._complete(self.next):
            self._launch()

    def _put_late(self, i: int, contributions: Sequence[Contribution | None]) -> None:
        for lane, contribution in zip(self.lanes, contributions):
            if contribution is None:
                continue
            if lane.squares is not None and i in self.came[self.plan.buckets_of[i][0]]:
                self.broken = True  # a part of it was squared and sent: the square of the sum cannot be made any more
                continue
            total = reduce(torch.add, [part.detach().float() for part in contribution.parts]).contiguous().view(-1)
            share = torch.zeros_like(total)
            for b in self.plan.buckets_of[i]:
                route = lane.route(b)
                if route.sending:
                    for block in self.plan.buckets[b].blocks[i]:
                        block.read(share).copy_(block.read(total)).mul_(route.sign)
            share = share * contribution.weight if lane.squares is None else share.square_() * lane.squares
            lane.late[i] = lane.late[i] + share if i in lane.late else share

    def _complete(self, b: int) -> bool:
        came = self.came[b]
        return all(came.get(i, 0) >= self.fires.get(i, 1) for i in self.plan.buckets[b].blocks)

    def _open(self, b: int) -> list[Tensor]:
        slot = (self.turn + b) % 2
        if b not in self.opened:
            self._land(slot)
            self.opened.add(b)
        return [lane.buffers[slot] for lane in self.lanes]

    def _launch(self) -> None:
        b = self.next
        bucket, slot, flights = self.plan.buckets[b], (self.turn + b) % 2, []
        for lane, buffer in zip(self.lanes, self._open(b)):
            if lane.route(b).sending:
                for i, blocks in bucket.blocks.items():
                    if i not in self.came[b]:
                        _clear(blocks, buffer)
                if lane.squares is not None:  # only now: it is the square of the sum of all parts
                    buffer[: bucket.numel].square_().mul_(lane.squares)
            flights.append((lane, lane.route(b).start(bucket, buffer, lane.scratch[slot])))
        self.flying[slot] = (b, flights)
        self.next += 1

    def _land(self, slot: int) -> None:
        """Wait for the bucket in a buffer and add what this rank owns to its partition."""
        flying, self.flying[slot] = self.flying[slot], None
        if flying is None:
            return
        runs = self.plan.buckets[flying[0]].runs
        for lane, flight in flying[1]:
            for work in flight.works:
                work.wait()
            if runs:
                got = flight.received.to(lane.partition.device, lane.partition.dtype)
                torch._foreach_add_(
                    [lane.partition[run.home : run.home + run.length] for run in runs],
                    [got[run.offset : run.offset + run.length] for run in runs],
                )

    def end_micro_step(self) -> None:
        """Launch the remaining buckets of this micro-step; a gradient that has not come counts as zero."""
        while self.lanes and self.next < len(self.plan.buckets):
            self._launch()
        self.turn += self.next
        self.begin([])

    def finish(self) -> None:
        """Wait for all buckets and free the buffers."""
        self._land(0)
        self._land(1)
        for lane in self.all_lanes:
            lane.buffers, lane.scratch = [], []

    def reduce_late(self, late: list[int], bucket_size: int) -> None:
        """Reduce the parameters whose gradient came too late on some rank, and add them to the partitions."""
        if not late:
            return
        plan = make_plan(self.geometry, late, bucket_size)
        route = ToOwners(self.geometry, self.group)
        for lane in self.all_lanes:
            again = Companion(self.geometry, plan, self.group, self.device, {})
            again.begin([Lane(plan, lane.partition, [route], dtype=torch.float32)])
            for i in late:
                if i in lane.late:
                    again.put(i, [Contribution(1.0, [lane.late.pop(i)])])
            again.end_micro_step()
            again.finish()


def _place(source: Tensor, target: Tensor, weight: float, *, first: bool) -> None:
    """target = weight * source if it is the first, otherwise target += weight * source."""
    if not first:
        target.add_(source, alpha=weight)
    elif source.dtype == target.dtype:
        torch.mul(source, weight, out=target)  # one pass over memory instead of two
    else:
        target.copy_(source).mul_(weight)


def _clear(blocks: Sequence[Block], buffer: Tensor) -> None:
    for block in blocks:
        block.write(buffer).zero_()
