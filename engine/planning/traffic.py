"""Every collective of an optimizer step and of an AGVM window, with its bytes, from sizes and settings alone.

Read off DeepSpeed 0.19.8 and `engine/zero`, and equal to what real ranks send (engine/planning/comparison.py). Payload
bytes do not depend on the order in which gradients come; where one bucket ends and the next begins does, and so does the
number of calls.

In a steady state: without the first steps, in which ZeRO-3 learns the model's order and ranks agree on names; and with
all parameters in every rank's graph (a head that a rank skips costs ZeRO-3 more, see engine/zero/complete_gradients.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engine.planning.gathers import Gathers
from engine.planning.model_facts import ModelFacts, PlannedShards, SyncedNorm, param_groups_of, plan_shards
from engine.zero.buckets import make_plan
from engine.zero.geometry import BYTES, reduced_once
from engine.zero.settings import CommunicationSettings

FALLBACK_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE, at stage 0


class Collective(NamedTuple):
    """`calls` equal calls, each of `bytes` of payload: what is reduced or broadcast, or the result of a gather.

    `when` is "micro-step" (in every one), "boundary" (once an optimizer step), "window" (once more in a step with an
    AGVM window) or "first window".
    """

    op: str
    bytes: int
    calls: int
    when: str
    purpose: str

    def times(self, accumulation: int, *, window: bool = False, first: bool = False) -> int:
        """How often it runs in one optimizer step."""
        turns = {"micro-step": accumulation, "boundary": 1, "window": int(window), "first window": int(first)}
        return self.calls * turns[self.when]


def sent_bytes(op: str, payload: int, world: int) -> float:
    """What a rank sends in a ring, on average over ranks; `payload` as in `Collective.bytes`."""
    if world == 1 or op == "barrier":
        return 0.0
    return (2 if op == "all_reduce" else 1) * payload * (world - 1) / world


def step_sent(collectives: Iterable[Collective], accumulation: int, world: int) -> float:
    """Bytes that a rank sends in an optimizer step without a window."""
    return sum(c.times(accumulation) * sent_bytes(c.op, c.bytes, world) for c in collectives)


def step_calls(
    collectives: Iterable[Collective], accumulation: int, *, window: bool = False, first: bool = False
) -> Counter[tuple[str, int]]:
    """How many calls of each (operation, payload bytes) an optimizer step makes."""
    calls: Counter[tuple[str, int]] = Counter()
    for c in collectives:
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
    if settings.world == 1:
        return []
    parameters, shards = model.parameters, plan_shards(model.parameters, settings.sharding)
    order = range(len(parameters))[::-1] if order is None else order
    order = [i for i in order if parameters[i].trained and parameters[i].numel]
    flags = 2 + sum(p.trained for p in parameters)
    collectives = [
        *_gradients(shards, settings, model, order),
        *_weights(shards, settings, model),
        *_norms_and_flags(shards, settings),
        *_statistics(model.norms),
        # engine/zero/complete_gradients.py: int32 flags; engine/train/loop.py: fp64 losses and two flags.
        Collective("all_reduce", 4 * flags, 1, "micro-step", "which gradients come"),
        Collective("all_reduce", 8 * (2 + losses), 1, "boundary", "losses on record"),
    ]
    if model.layer_sums:  # engine/zero/layer_norms.py
        size = 8 * model.layer_sums * len(shards.parameters)
        collectives.append(Collective("all_reduce", size, 1, "boundary", "layer norms"))
        if model.layer_sums == 2 and settings.clipping and settings.stage:  # LAMB needs the clipping factor first
            collectives.append(Collective("all_reduce", 8, 1, "boundary", "layer norms"))
    if model.window is not None:
        collectives += _window(shards, settings, model, order, backend)
    # Equal ones as one entry with their number, in the order of the first of them.
    found: Counter[tuple[str, int, str, str]] = Counter()
    for c in collectives:
        found[c.op, c.bytes, c.when, c.purpose] += c.calls if c.bytes else 0
    return [Collective(op, size, calls, when, why) for (op, size, when, why), calls in found.items() if calls]


def _gradients(
    shards: PlannedShards, settings: CommunicationSettings, model: ModelFacts, order: Sequence[int]
) -> Iterator[Collective]:
    size, bucket_size, parameters = BYTES[settings.communication_dtype], settings.reduce_bucket_size, model.parameters
    if settings.whole_gradient:
        sizes = [p.numel for p in parameters if p.trained]
        if settings.stage == 1:  # BF16_Optimizer reduces one padded flat tensor for each group
            groups = [[p.numel for p in parameters if p.group == k] for k in param_groups_of(parameters)]
            whole = 2 * settings.world
            sizes = [math.ceil(sum(numels) / whole) * whole for numels in groups]
        for numel in _overfilled(sizes, FALLBACK_BUCKET):
            yield Collective("all_reduce", size * numel, 1, "boundary", "gradients")
        return
    if settings.stage == 1 and not settings.overlap_comm:  # at the boundary, group by group
        order = sorted(range(len(parameters)), key=lambda i: parameters[i].group or 0)
        order = [i for i in order if parameters[i].trained and parameters[i].numel]
    when = "boundary" if settings.stage == 1 else "micro-step"
    for bucket in _buckets([(i, parameters[i].numel) for i in order], bucket_size):
        numel = sum(parameters[i].numel for i in bucket)
        if settings.stage < 3:
            for op, elements in _flat_reductions(shards, settings, bucket):
                yield Collective(op, size * elements, 1, when, "gradients")
        elif settings.reduce_scatter or not settings.contiguous_gradients or numel > bucket_size:
            padded = _padded(model, settings, bucket)
            yield Collective("reduce_scatter", size * padded, 1, when, "gradients")
        else:
            yield Collective("all_reduce", size * numel, 1, when, "gradients")


def _flat_reductions(
    shards: PlannedShards, settings: CommunicationSettings, bucket: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """How ZeRO-1/2 reduces a bucket: as a whole, or piece by piece to the owners."""
    places = [shards.order.index(i) for i in bucket]
    pieces = [(rank, stop - start) for k in places for rank, start, stop in shards.geometry.ranges(k)]
    if not settings.reduce_scatter or not settings.contiguous_gradients:
        yield "all_reduce", sum(n for _, n in pieces)
    elif settings.multi_rank_allreduce:
        for numel in _overfilled([n for _, n in pieces], settings.reduce_bucket_size):
            yield "all_reduce", numel
    else:
        for owner in dict.fromkeys(rank for rank, _ in pieces):
            for numel in _overfilled([n for rank, n in pieces if rank == owner], settings.reduce_bucket_size):
                yield "reduce", numel


def _weights(shards: PlannedShards, settings: CommunicationSettings, model: ModelFacts) -> Iterator[Collective]:
    size = BYTES[settings.dtype]
    if settings.stage in (1, 2):
        for share in shards.geometry.shard_sizes():
            yield Collective("all_gather", size * share * settings.world, 1, "boundary", "weights")
    elif settings.stage == 3:
        gathers = Gathers(model, settings)
        for i in sorted(gathers.persistent):  # also those that are not trained: the step partitions everything
            yield Collective("all_gather", size * _padded(model, settings, [i]), 1, "boundary", "weights")
        for members in gathers.calls:
            yield Collective("all_gather", size * _padded(model, settings, members), 1, "micro-step", "weights")


def _norms_and_flags(shards: PlannedShards, settings: CommunicationSettings) -> Iterator[Collective]:
    groups = len(shards.geometry.shard_sizes())
    if settings.stage == 0:
        if settings.dtype == "float32" and settings.clipping > 0:  # in half precision every rank has the whole norm
            yield Collective("all_reduce", 4, 1, "boundary", "gradient norm")
    elif settings.stage == 3:
        if settings.dtype == "float16":
            yield Collective("all_reduce", 1, 1, "boundary", "overflow")
        yield Collective("all_reduce", 4 if settings.offload else 8, groups, "boundary", "gradient norm")
    elif not settings.whole_gradient:
        if settings.check_overflow:
            yield Collective("all_reduce", 1, 1, "boundary", "overflow")
        if settings.compute_grad_norm:
            yield Collective("all_reduce", 4, groups, "boundary", "gradient norm")


def _statistics(norms: Iterable[SyncedNorm]) -> Iterator[Collective]:
    """models/batch_norm.py, in fp32: count and sums, then squares, and two sums backward."""
    for channels, forward in norms:
        for width, calls in ((channels + 1, forward), (channels, forward), (2 * channels, 1)):
            yield Collective("all_reduce", 4 * width, calls, "micro-step", "batch norm")


def _window(
    shards: PlannedShards, settings: CommunicationSettings, model: ModelFacts, order: Sequence[int], backend: str
) -> Iterator[Collective]:
    """engine/zero/{capture,companion,window}.py."""
    assert model.window is not None
    kind, bucket_size = model.window
    place = {i: k for k, i in enumerate(shards.order)}
    buckets = make_plan(shards.geometry, [place[i] for i in order], bucket_size).buckets
    once = reduced_once(
        kind, keeps_local=settings.keeps_local, world=settings.world, accumulation=settings.accumulation
    )
    turns = 1 if once else settings.accumulation
    plain = BYTES[settings.communication_dtype]
    lanes = [("first window", plain, "self-check")]
    if kind != "norms":
        lanes.insert(0, ("window", 4 if kind == "squared" else plain, "second gradient"))
    for when, size, purpose in lanes:
        for bucket in buckets:
            if shards.geometry.even and backend == "nccl":
                yield Collective("reduce_scatter", size * bucket.numel, turns, when, purpose)
                continue
            for _, _, length in bucket.segments:
                yield Collective("reduce", size * length, turns, when, purpose)
    modules, groups = {p.module for p in model.parameters if p.trained}, param_groups_of(model.parameters)
    yield Collective("all_reduce", 8 * (2 * len(shards.order) + 3), 1, "window", "which gradients came")
    yield Collective("all_reduce", 8 * 3 * len(modules), 1, "window", "sums of each module")
    yield Collective("all_reduce", 8 * 2 * len(groups), 1, "first window", "self-check")


def _padded(model: ModelFacts, settings: CommunicationSettings, members: Iterable[int]) -> int:
    """Elements of parameters whose chunks all have the same size."""
    return sum(math.ceil(model.parameters[i].numel / settings.world) * settings.world for i in members)


def _buckets(sizes: Iterable[tuple[int, int]], size: int) -> Iterator[list[int]]:
    """Buckets that are sent before the parameter that would not fit; given are parameters and their elements."""
    bucket: list[int] = []
    filled = 0
    for i, numel in sizes:
        if bucket and filled + numel > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += numel
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
