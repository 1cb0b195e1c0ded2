"""Every collective of an optimizer step and of an AGVM window, with its bytes, from sizes and settings alone.

Read off DeepSpeed 0.19.8 and `engine/zero`, and equal to what real ranks send (benchmarks/traffic_against_measured.py).
Payload bytes do not depend on the order in which gradients come; where buckets are cut, and so the number of calls,
does: `order` says in which order they come, by default the reverse of the model's.

In a steady state: without the first steps, in which ZeRO-3 learns the model's order and ranks agree on names; and with
all parameters in every rank's graph (a head that a rank skips costs ZeRO-3 more, see engine/zero/complete_gradients.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.planning.gathers import gathered
from engine.planning.settings import WindowSettings
from engine.planning.shards import Parameter, PlannedShards, param_groups_of, plan_shards
from engine.zero.buckets import make_plan
from engine.zero.geometry import BYTES, reduced_once
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings

_FALLBACK_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE, at stage 0


@dataclass(frozen=True)
class Collective:
    """`calls` alike ones, each of `bytes` of payload: what is reduced or broadcast, or what a gather puts together.

    `when` is "micro-step" (in every one), "boundary" (once an optimizer step), "window" (once more in a step with an
    AGVM window) or "first window". `module` is named where all of it belongs to one.
    """

    op: str
    bytes: int
    calls: int
    when: str
    purpose: str
    module: str | None = None


@dataclass(frozen=True)
class SyncedNorm:
    """A batch norm with statistics over all ranks: how often it runs forward and backward in a micro-step."""

    channels: int
    module: str
    forward: int = 1
    backward: int = 1


def sent_bytes(op: str, payload: int, world: int) -> float:
    """What a rank sends, on average over ranks, in a ring: payload is that of `Collective.bytes`."""
    if world == 1 or op == "barrier":
        return 0.0
    return (2 if op == "all_reduce" else 1) * payload * (world - 1) / world


def step_traffic(
    parameters: Sequence[Parameter],
    settings: CommunicationSettings,
    *,
    window: WindowSettings | None = None,
    order: Sequence[int] | None = None,
    uses: Sequence[Use] | None = None,
    norms: Sequence[SyncedNorm] = (),
    losses: int = 0,
    layer_numbers: int = 0,
    backend: str = "nccl",
) -> list[Collective]:
    """All collectives of a step: DeepSpeed's, the loop's, with `window` AGVM's, and with `layer_numbers` those of LARS
    and LAMB, which add up so many numbers for each layer.

    `order` is that in which gradients come (places in `parameters`), `uses` how modules use parameters (ZeRO-3;
    `gathers.model_uses`, by default each parameter once, in order), `losses` the number of named losses.
    """
    if settings.world == 1:
        return []
    order = [i for i in (order if order is not None else reversed(range(len(parameters)))) if parameters[i].trained]
    collectives = [
        *_gradients(parameters, settings, order),
        *_weights(parameters, settings, uses),
        *_norms_and_flags(parameters, settings),
        *_statistics(norms),
        # engine/zero/complete_gradients.py: int32 flags; engine/train/loop.py: fp64 losses and two flags.
        Collective("all_reduce", 4 * (2 + sum(p.trained for p in parameters)), 1, "micro-step", "which gradients come"),
        Collective("all_reduce", 8 * (2 + losses), 1, "boundary", "losses on record"),
    ]
    if layer_numbers:  # engine/zero/layer_norms.py
        trained = sum(p.trained and p.numel > 0 for p in parameters)
        collectives.append(Collective("all_reduce", 8 * layer_numbers * trained, 1, "boundary", "layer norms"))
        if layer_numbers == 2 and settings.clipping and settings.stage:  # LAMB has to know its factor before
            collectives.append(Collective("all_reduce", 8, 1, "boundary", "layer norms"))
    if window is not None:
        collectives += _window(parameters, settings, window, order, backend)
    return _joined(collectives)


def _joined(collectives: Iterable[Collective]) -> list[Collective]:
    """Alike ones as one entry with their number, in the order of their first."""
    found: dict[tuple, int] = {}
    for c in collectives:
        if c.bytes and c.calls:
            key = (c.op, c.bytes, c.when, c.purpose, c.module)
            found[key] = found.get(key, 0) + c.calls
    return [
        Collective(op, size, calls, when, purpose, module) for (op, size, when, purpose, module), calls in found.items()
    ]


def times(collective: Collective, accumulation: int, *, window: bool = False, first: bool = False) -> int:
    """How often a collective runs in one optimizer step."""
    return (
        collective.calls
        * {"micro-step": accumulation, "boundary": 1, "window": int(window), "first window": int(first)}[
            collective.when
        ]
    )


def step_calls(
    collectives: Sequence[Collective], accumulation: int, *, window: bool = False, first: bool = False
) -> Counter[tuple[str, int]]:
    """How many calls of each (operation, payload bytes) an optimizer step makes."""
    calls: Counter[tuple[str, int]] = Counter()
    for c in collectives:
        calls[c.op, c.bytes] += times(c, accumulation, window=window, first=first)
    return +calls


def step_sent(collectives: Sequence[Collective], accumulation: int, world: int, *, window: bool = False) -> float:
    """Bytes that a rank sends in an optimizer step."""
    return sum(times(c, accumulation, window=window) * sent_bytes(c.op, c.bytes, world) for c in collectives)


def _gradients(
    parameters: Sequence[Parameter], settings: CommunicationSettings, order: Sequence[int]
) -> Iterator[Collective]:
    size = BYTES[settings.communication_dtype]
    if settings.stage == 0 or (settings.stage == 1 and settings.fp32_accumulation):
        if settings.stage == 0:
            pieces = [[i] for i, p in enumerate(parameters) if p.trained and p.numel]
        else:  # BF16_Optimizer hands out one flat tensor for each group
            pieces = [
                [i for i, p in enumerate(parameters) if p.group == k and p.numel] for k in param_groups_of(parameters)
            ]
        sizes = [sum(parameters[i].numel for i in piece) for piece in pieces]
        if settings.stage == 1:
            whole = 2 * settings.world
            sizes = [math.ceil(n / whole) * whole for n in sizes]
        for bucket in _after_filling(list(zip(pieces, sizes)), _FALLBACK_BUCKET):
            members = [i for piece, _ in bucket for i in piece]
            yield Collective(
                "all_reduce", size * sum(n for _, n in bucket), 1, "boundary", "gradients", _module(parameters, members)
            )
        return
    if settings.stage == 1 and not settings.overlap_comm:  # at the boundary, group by group
        order = [i for k in param_groups_of(parameters) for i, p in enumerate(parameters) if p.group == k]
    when = "boundary" if settings.stage == 1 else "micro-step"
    layout = plan_shards(parameters, settings.sharding) if settings.stage < 3 else None
    for bucket in _before_filling(parameters, [i for i in order if parameters[i].numel], settings.reduce_bucket_size):
        module, numel = _module(parameters, bucket), sum(parameters[i].numel for i in bucket)
        if settings.stage == 3:
            if settings.reduce_scatter or not settings.contiguous_gradients or numel > settings.reduce_bucket_size:
                yield Collective(
                    "reduce_scatter",
                    size * sum(_padded(parameters[i], settings.world) for i in bucket),
                    1,
                    when,
                    "gradients",
                    module,
                )
            else:
                yield Collective("all_reduce", size * numel, 1, when, "gradients", module)
        else:
            for op, elements in _flat_reductions(layout, settings, bucket):
                yield Collective(op, size * elements, 1, when, "gradients", module)


def _flat_reductions(
    layout: PlannedShards, settings: CommunicationSettings, bucket: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """How ZeRO-1/2 reduces a bucket: as a whole, or piece by piece to the owners."""
    place = {i: k for k, i in enumerate(layout.order)}
    numel = sum(layout.parameters[place[i]].numel for i in bucket)
    if not settings.reduce_scatter or not settings.contiguous_gradients:
        yield "all_reduce", numel
        return
    pieces = [(rank, stop - start) for i in bucket for rank, start, stop in layout.geometry.ranges(place[i])]
    if settings.multi_rank_allreduce:
        for part in _after_filling(pieces, settings.reduce_bucket_size):
            yield "all_reduce", sum(n for _, n in part)
        return
    for owner in dict.fromkeys(rank for rank, _ in pieces):
        for part in _after_filling([piece for piece in pieces if piece[0] == owner], settings.reduce_bucket_size):
            yield "reduce", sum(n for _, n in part)


def _weights(
    parameters: Sequence[Parameter], settings: CommunicationSettings, uses: Sequence[Use] | None
) -> Iterator[Collective]:
    size = BYTES[settings.dtype]
    if settings.stage in (1, 2):
        layout = plan_shards(parameters, settings.sharding)
        for group, share in enumerate(layout.geometry.shard_sizes()):
            yield Collective(
                "all_gather",
                size * share * settings.world,
                1,
                "boundary",
                "weights",
                _module(parameters, [i for i, p in enumerate(parameters) if p.group == group]),
            )
    elif settings.stage == 3:
        persistent = persistent_parameters(parameters, settings)
        for i in sorted(persistent):  # those that are not trained too: the step cuts everything up
            if parameters[i].numel:
                yield Collective(
                    "all_gather",
                    size * _padded(parameters[i], settings.world),
                    1,
                    "boundary",
                    "weights",
                    parameters[i].module,
                )
        for members in gathered(parameters, settings, persistent, uses):
            yield Collective(
                "all_gather",
                size * sum(_padded(parameters[i], settings.world) for i in members),
                1,
                "micro-step",
                "weights",
                _module(parameters, members),
            )


def persistent_parameters(parameters: Sequence[Parameter], settings: CommunicationSettings) -> set[int]:
    """Those that ZeRO-3 keeps whole on every rank: the small ones, as far as they go into the model's threshold."""
    kept, total = set(), 0
    for i, parameter in enumerate(parameters):
        fits = parameter.numel + total <= settings.model_persistence_threshold
        if fits and parameter.numel <= settings.persistence_threshold:
            kept.add(i)
            total += parameter.numel
    return kept


def _norms_and_flags(parameters: Sequence[Parameter], settings: CommunicationSettings) -> Iterator[Collective]:
    if settings.stage == 0:
        if settings.dtype == "float32" and settings.clipping > 0:  # in half precision every rank has the whole norm
            yield Collective("all_reduce", 4, 1, "boundary", "gradient norm")
    elif settings.stage == 3:
        layout = plan_shards(parameters, settings.sharding)
        if settings.dtype == "float16":
            yield Collective("all_reduce", 1, 1, "boundary", "overflow")
        yield Collective(
            "all_reduce", 4 if settings.offload else 8, len(layout.geometry.shard_sizes()), "boundary", "gradient norm"
        )
    elif not (settings.stage == 1 and settings.fp32_accumulation):
        if settings.check_overflow:
            yield Collective("all_reduce", 1, 1, "boundary", "overflow")
        if settings.compute_grad_norm:
            yield Collective("all_reduce", 4, len(param_groups_of(parameters)), "boundary", "gradient norm")


def _statistics(norms: Sequence[SyncedNorm]) -> Iterator[Collective]:
    """models/batch_norm.py, in fp32: count and sums, then squares, and two sums backward."""
    for norm in norms:
        for width, calls in (
            (norm.channels + 1, norm.forward),
            (norm.channels, norm.forward),
            (2 * norm.channels, norm.backward),
        ):
            yield Collective("all_reduce", 4 * width, calls, "micro-step", "batch norm", norm.module)


def _window(
    parameters: Sequence[Parameter],
    settings: CommunicationSettings,
    window: WindowSettings,
    order: Sequence[int],
    backend: str,
) -> Iterator[Collective]:
    """engine/zero/{capture,companion,window}.py."""
    layout = plan_shards(parameters, settings.sharding)
    place = {i: k for k, i in enumerate(layout.order)}
    plan = make_plan(layout.geometry, [place[i] for i in order if i in place], window.bucket_size)
    once = reduced_once(
        window.kind,
        keeps_local=settings.keeps_local,
        world=settings.world,
        accumulation=settings.accumulation,
    )
    turns = 1 if once else settings.accumulation
    plain = BYTES[settings.communication_dtype]
    lanes = [("first window", plain, "self-check")]
    if window.kind != "norms":
        lanes.insert(0, ("window", 4 if window.kind == "squared" else plain, "second gradient"))
    for when, size, purpose in lanes:
        for bucket in plan.buckets:
            module = _module(parameters, [layout.order[k] for k in bucket.blocks])
            if layout.geometry.even and backend == "nccl":
                yield Collective("reduce_scatter", size * bucket.numel, turns, when, purpose, module)
                continue
            for _, _, length in bucket.segments:
                yield Collective("reduce", size * length, turns, when, purpose, module)
    names = {p.module for p in parameters if p.trained}
    yield Collective("all_reduce", 8 * (2 * len(layout.order) + 3), 1, "window", "which gradients came")
    yield Collective("all_reduce", 8 * 3 * len(names), 1, "window", "sums of each module")
    yield Collective("all_reduce", 8 * 2 * len(param_groups_of(parameters)), 1, "first window", "self-check")


def _padded(parameter: Parameter, world: int) -> int:
    return math.ceil(parameter.numel / world) * world


def _module(parameters: Sequence[Parameter], members: Iterable[int]) -> str | None:
    names = {parameters[i].module for i in members}
    return names.pop() if len(names) == 1 else None


def _before_filling(parameters: Sequence[Parameter], order: Sequence[int], size: int) -> Iterator[list[int]]:
    """Buckets that are sent before the parameter that would not fit."""
    bucket: list[int] = []
    filled = 0
    for i in order:
        if bucket and filled + parameters[i].numel > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled += parameters[i].numel
    if bucket:
        yield bucket


def _after_filling(pieces: Sequence[tuple], size: int) -> Iterator[list[tuple]]:
    """Buckets that are sent with the piece that overfills them; a piece is (..., its elements)."""
    bucket: list[tuple] = []
    filled = 0
    for piece in pieces:
        bucket.append(piece)
        filled += piece[-1]
        if filled > size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket
