"""How far apart the ranks' clocks are, how fast small messages are, and how fast the accelerator's backend reduces."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from engine import distributed
from engine.doctor.finding import Finding, Skipped, memory

SIZES = tuple(4 * 16**power for power in range(7))  # bytes, 4 B to 64 MB
MOST_REPETITIONS, SECONDS_PER_SIZE = 20, 1.5
LARGEST_SKEW = 2.0  # seconds; a folder's lock and the records of a run compare times of several hosts
_ALONE = "one rank, nobody to talk to"


def clocks() -> Finding:
    """All ranks leave a barrier at nearly the same moment and read their clocks. The median of a few such readings."""
    if distributed.world_size() == 1:
        raise Skipped(_ALONE)
    readings: list[list[float]] = []
    for _ in range(7):
        distributed.barrier()
        readings.append(distributed.all_gather_objects(time.time()))
    apart = [
        statistics.median(reading[rank] - reading[0] for reading in readings)
        for rank in range(distributed.world_size())
    ]
    skew = max(apart) - min(apart)
    return Finding(
        f"{skew * 1e3:.2g} ms apart (at most {LARGEST_SKEW:.0f} s)",
        skew <= LARGEST_SKEW,
        {"seconds_after_rank_0": apart},
    )


def control_latency() -> Finding:
    """One small message of the kind that carries flags and errors, on gloo."""
    if distributed.world_size() == 1:
        raise Skipped(_ALONE)
    flags, seconds = torch.zeros(1, dtype=torch.int64), []
    for _ in range(20):
        flags.fill_(1)
        began = time.perf_counter()
        distributed.sum_over_ranks(flags)
        seconds.append(time.perf_counter() - began)
    right = int(flags) == distributed.world_size()
    median = statistics.median(seconds)
    return Finding(
        f"{median * 1e6:.0f} us for an all-reduce of 8 B on gloo (median of 20)" + ("" if right else ", sum is WRONG"),
        right,
        {"seconds": seconds},
    )


def all_reduce() -> Finding:
    """A table in the terms of nccl-tests: algorithm bandwidth = bytes / time, bus bandwidth = that x 2 (N - 1) / N."""
    if distributed.world_size() == 1:
        raise Skipped(_ALONE)
    world, rows = distributed.world_size(), []
    for size in SIZES:
        rows.append(_measure(size, world))
    wrong = [memory(row["bytes"]) for row in rows if row["wrong"]]
    best, least = max(row["bus_bandwidth"] for row in rows), rows[0]["seconds"]
    text = f"{best / 1e9:.3g} GB/s bus bandwidth, {least * 1e6:.0f} us for 4 B, on {dist.get_backend()}"
    if wrong:
        text += f"; WRONG sums at {', '.join(wrong)}"
    return Finding(text, not wrong, {"rows": rows}, _table(rows))


def _measure(size: int, world: int) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

    synchronise = get_accelerator().synchronize
    # Ones and ranks: sums of whole numbers are exact in fp32, whatever the order.
    values = torch.full((size // 4,), float(distributed.rank() + 1), device=distributed.device())
    began = time.perf_counter()
    dist.all_reduce(values)
    synchronise()
    warm_up = max(distributed.all_gather_objects(time.perf_counter() - began))
    wrong = bool((values != world * (world + 1) / 2).any())
    # The first call includes the connection's set-up, so it only bounds the number of the others.
    repetitions = max(2, min(MOST_REPETITIONS, int(SECONDS_PER_SIZE / max(warm_up, 1e-6))))
    values.zero_()  # sums of sums would overflow
    distributed.barrier()
    synchronise()
    began = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(values)
    synchronise()
    own = (time.perf_counter() - began) / repetitions
    seconds = statistics.mean(distributed.all_gather_objects(own))
    bandwidth = size / seconds
    return {
        "bytes": size,
        "repetitions": repetitions,
        "seconds": seconds,
        "algorithm_bandwidth": bandwidth,
        "bus_bandwidth": bandwidth * 2 * (world - 1) / world,
        "wrong": wrong,
    }


def _table(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    head = f"{'size (B)':>12} {'time (us)':>12} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}"
    return (
        head,
        *(
            f"{row['bytes']:>12} {row['seconds'] * 1e6:>12.1f} {row['algorithm_bandwidth'] / 1e9:>13.3g} "
            f"{row['bus_bandwidth'] / 1e9:>13.3g}"
            for row in rows
        ),
    )
