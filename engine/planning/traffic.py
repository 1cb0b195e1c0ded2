"""Every collective of an optimizer step and of an AGVM window, with its bytes, from sizes and settings alone.

Read off DeepSpeed 0.19.8 and `engine/zero`, and equal to what real ranks send (engine/planning/comparison.py). Payload
bytes do not depend on the order in which gradients come; the ends of buckets do, and so does the number of calls.

In a steady state: without the first steps, in which ZeRO-3 learns the model's order and ranks agree on names, and with
all parameters in every rank's graph (skipped heads cost ZeRO-3 more, see engine/zero/complete_gradients.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.planning.gathers import Gathers
from engine.planning.model_facts import ModelFacts, param_groups_of, plan_shards
from engine.zero.buckets import Bucket, make_plan
from engine.zero.geometry import BYTES, Chunks
from engine.zero.settings import CommunicationSettings

FALLBACK_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE, at stage 0


class Collective(NamedTuple):
    """`calls` equal calls, each of `bytes` of payload: what is reduced or broadcast, the result of a gather, or what
    all ranks together hand over in an all-to-all.

    `when` is "micro-step" (in every one), "boundary" (once an optimizer step), "window" (once more in a step with an
    AGVM window) or "first window". `members` are the ranks that take part, if not all do.
    """

    op: str
    bytes: int
    calls: int
    when: str
    purpose: str
    members: range | None = None

    def times(self, accumulation: int, *, window: bool = False, first: bool = False) -> int:
        """How often it runs in one optimizer step."""
        turns = {"micro-step": accumulation, "boundary": 1, "window": int(window), "first window": int(first)}
        return self.calls * turns[self.when]

    def sent(self, world: int) -> float:
        """What a rank sends in one call, on average over all ranks."""
        return sent_bytes(self.op, self.bytes, world, None if self.members is None else len(self.members))


def sent_bytes(op: str, payload: int, world: int, members: int | None = None) -> float:
    """What a rank sends in a ring of `members` ranks (default: all), on average over all; `payload` as in
    `Collective.bytes`."""
    n = world if members is None else members
    if n == 1 or op == "barrier":
        return 0.0
    if op == "all_to_all":
        return payload * (n - 1) / n / world
    return (2 if op == "all_reduce" else 1) * payload * (n - 1) / world


def step_calls(
    collectives: Iterable[Collective], accumulation: int, *, window: bool = False, first: bool = False, rank: int = 0
) -> Counter[tuple[str, int]]:
    """How many calls of each (operation, payload bytes) a rank makes in an optimizer step."""
    calls: Counter[tuple[str, int]] = Counter()
    for c in collectives:
        if c.members is None or rank in c.members:
            calls[c.op, c.bytes] += c.times(accumulation, window=window, first=first)
    return +calls


def step_traffic(
    model: ModelFacts,
    settings: CommunicationSettings,
    *,
    order: Sequence[int] | None = None,
    losses: int = 0,
    backend: str = "nccl",
) -> list[Collective]:
    """All collectives of a step: DeepSpeed's, the loop's, and the optimizer's.

    `order` is the order in which gradients come, as places in `parameters` (default: the reverse of the model's).
    `losses` is the number of named losses.
    """
    return _Step(model, settings, order).collectives(losses, backend) if settings.world > 1 else []


class _Step:
    """Adds up the collectives of a step, equal ones as one entry, in the order of the first of them."""

    def __init__(self, model: ModelFacts, settings: CommunicationSettings, order: Sequence[int] | None) -> None:
        self.model, self.settings, self.parameters = model, settings, model.parameters
        self.shards = plan_shards(model.parameters, settings.sharding)
        self.groups = param_groups_of(model.parameters)
        self.found: Counter[tuple[str, int, str, str, range | None]] = Counter()
        places = reversed(range(len(model.parameters))) if order is None else order
        self.order = [i for i in places if self.parameters[i].trained and self.parameters[i].numel]

    def add(self, op: str, size: int, when: str, purpose: str, calls: int = 1, members: range | None = None) -> None:
        if size and calls:
            self.found[op, size, when, purpose, members] += calls

    def collectives(self, losses: int, backend: str) -> list[Collective]:
        model, settings = self.model, self.settings
        self._gradients()
        self._weights()
        self._norms_and_flags()
        for channels, forward in model.norms:
            # models/batch_norm.py: sums, squares and count in fp64, and two sums in fp32 backward.
            for size, calls in ((8 * (2 * channels + 1), forward), (4 * 2 * channels, 1)):
                self.add("all_reduce", size, "micro-step", "batch norm", calls)
        # engine/zero/complete_gradients.py, in fp32: whether the loss is finite, which gradients come; and
        # engine/train/forward.py: four notices, losses.
        message = 1 + sum(p.trained for p in self.parameters) + 4 + losses
        self.add("all_reduce", 4 * message, "micro-step", "which gradients come")
        # engine/zero/layer_norms.py
        self.add("all_reduce", 8 * model.layer_sums * len(self.shards.order), "boundary", "layer norms")
        if model.layer_sums == 2 and settings.clipping and settings.stage:  # LAMB needs the clipping factor first
            self.add("all_reduce", 8, "boundary", "layer norms")
        if model.window is not None:
            self._window(*model.window, backend)
        return [
            Collective(op, size, calls, when, purpose, members)
            for (op, size, when, purpose, members), calls in self.found.items()
        ]

    def _gradients(self) -> None:
        settings, numel = self.settings, [p.numel for p in self.parameters]
        size, bucket_size = BYTES[settings.communication_dtype], settings.reduce_bucket_size
        if settings.whole_gradient:
            sizes = [p.numel for p in self.parameters if p.trained]
            if settings.stage == 1:  # BF16_Optimizer reduces one padded flat tensor for each group
                groups = [sum(p.numel for p in self.parameters if p.group == k) for k in self.groups]
                sizes = [math.ceil(n / (2 * settings.world)) * 2 * settings.world for n in groups]
            for elements in _overfilled(sizes, FALLBACK_BUCKET):
                self.add("all_reduce", size * elements, "boundary", "gradients")
            return
        order = self.order
        if settings.stage == 1 and not settings.overlap_comm:  # at the boundary, group by group
            order = sorted(order, key=lambda i: (self.parameters[i].group or 0, i))
        when = "boundary" if settings.stage == 1 else "micro-step"
        for bucket in _buckets(order, numel, bucket_size):
            elements = sum(numel[i] for i in bucket)
            if settings.stage < 3:
                self._reduce_to_partitions(bucket, size, when)
            elif settings.reduce_scatter or not settings.contiguous_gradients or elements > bucket_size:
                self.add("reduce_scatter", size * self._padded(bucket), when, "gradients")
            else:
                self.add("all_reduce", size * elements, when, "gradients")

    def _reduce_to_partitions(self, bucket: Sequence[int], size: int, when: str) -> None:
        """How ZeRO-1/2 reduces a bucket: as a whole, or piece by piece to the owners."""
        settings, shards = self.settings, self.shards
        places = [shards.order.index(i) for i in bucket]
        pieces = [(rank, stop - start) for k in places for rank, start, stop in shards.geometry.ranges(k)]
        if not settings.reduce_scatter or not settings.contiguous_gradients:
            self.add("all_reduce", size * sum(n for _, n in pieces), when, "gradients")
            return
        for owner in [None] if settings.multi_rank_allreduce else dict.fromkeys(rank for rank, _ in pieces):
            sizes = [n for rank, n in pieces if owner in (None, rank)]
            for elements in _overfilled(sizes, settings.reduce_bucket_size):
                self.add("all_reduce" if owner is None else "reduce", size * elements, when, "gradients")

    def _weights(self) -> None:
        size = BYTES[self.settings.dtype]
        if self.settings.stage in (1, 2):
            for share in self.shards.geometry.shard_sizes():
                self.add("all_gather", size * share * self.settings.world, "boundary", "weights")
        elif self.settings.stage == 3:
            gathers = Gathers(self.model, self.settings)
            for i in sorted(gathers.persistent):  # also those that are not trained: the step partitions everything
                self.add("all_gather", size * self._padded([i]), "boundary", "weights")
            for members in gathers.calls:
                self.add("all_gather", size * self._padded(members), "micro-step", "weights")

    def _norms_and_flags(self) -> None:
        settings, norms, norm_size, overflow = self.settings, 0, 4, False
        if settings.stage == 0:  # in half precision every rank has the whole norm
            norms = int(settings.dtype == "float32" and settings.clipping > 0)
        elif settings.stage == 3:
            norms, norm_size = len(self.shards.geometry.shard_sizes()), 4 if settings.offload else 8
            overflow = settings.dtype == "float16"
        elif not settings.whole_gradient:
            norms, overflow = len(self.groups) if settings.compute_grad_norm else 0, settings.check_overflow
        self.add("all_reduce", 1, "boundary", "overflow", int(overflow))
        self.add("all_reduce", norm_size, "boundary", "gradient norm", norms)

    def _window(self, kind: str, bucket_size: int, backend: str) -> None:
        """engine/zero/{halves,capture,companion,routes,window}.py."""
        settings, shards = self.settings, self.shards
        place = {i: k for k, i in enumerate(shards.order)}
        buckets = make_plan(shards.geometry, [place[i] for i in self.order], bucket_size).buckets
        halves, plain = settings.halves, BYTES[settings.communication_dtype]
        nccl = backend == "nccl"
        if kind == "signed" and halves.reduced_at is not None:
            senders = halves.senders
            for b, bucket in enumerate(buckets):
                self._send(bucket, plain, "window", "second gradient", senders[b % len(senders)], nccl)
        elif kind == "squared":
            for bucket in buckets * settings.accumulation:
                self._to_owners(bucket, 4, "window", "second gradient", nccl)
        for bucket in buckets * settings.accumulation:
            self._to_owners(bucket, plain, "first window", "self-check", nccl)
        modules = {p.module for p in self.parameters if p.trained}
        self.add("all_reduce", 8 * (4 * len(shards.order) + 3), "window", "which gradients came")
        self.add("all_reduce", 8 * 3 * len(modules), "window", "sums of each module")
        self.add("all_reduce", 8 * 2 * len(self.groups), "first window", "self-check")

    def _to_owners(self, bucket: Bucket, size: int, when: str, purpose: str, nccl: bool) -> None:
        if nccl:  # one call, or reductions to several owners that are launched as one
            even = isinstance(self.shards.geometry, Chunks)
            self.add("reduce_scatter" if even else "reduce", size * bucket.numel, when, purpose)
            return
        for _, _, length in bucket.segments:
            self.add("reduce", size * length, when, purpose)

    def _send(self, bucket: Bucket, size: int, when: str, purpose: str, senders: range, nccl: bool) -> None:
        """From some ranks: reduced among them in equal slices, then handed to the owners."""
        if len(senders) == self.settings.world:
            return self._to_owners(bucket, size, when, purpose, nccl)
        width = -(-bucket.numel // len(senders))
        if len(senders) > 1 and nccl:
            self.add("reduce_scatter", size * width * len(senders), when, purpose, members=senders)
        elif len(senders) > 1:
            for start in range(0, bucket.numel, width):
                self.add("reduce", size * min(width, bucket.numel - start), when, purpose, members=senders)
        self.add("all_to_all", size * bucket.numel, when, purpose)

    def _padded(self, members: Iterable[int]) -> int:
        """Elements of parameters whose chunks all have the same size."""
        world = self.settings.world
        return sum(math.ceil(self.parameters[i].numel / world) * world for i in members)


def _buckets(order: Iterable[int], numel: Sequence[int], size: int) -> Iterator[list[int]]:
    """Buckets that are sent before the parameter that would not fit."""
    bucket: list[int] = []
    filled = 0
    for i in order:
        if bucket and filled + numel[i] > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += numel[i]
    if bucket:
        yield bucket


def _overfilled(sizes: Iterable[int], size: int) -> Iterator[int]:
    """Elements of buckets that are sent together with the piece that overfills them."""
    filled = 0
    for numel in sizes:
        filled += numel
        if filled > size:
            yield filled
            filled = 0
    if filled:
        yield filled
