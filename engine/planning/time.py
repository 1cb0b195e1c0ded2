"""Seconds of a step, hours of a run, and the efficiency of a card from a measured step.

Compute: every operator of the traced step takes the longest of its arithmetic, its memory traffic and a launch, at
`Hardware.efficiency`. Ranks wait for the one with the most pixels. Communication: every collective of
`engine/planning/traffic.py` in a ring over the slowest link, plus a latency that grows with the logarithm of the ranks;
what DeepSpeed overlaps with backward counts only where it takes longer. Loading and start-up are not included.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.batch import KEYS
from engine.errors import UserError
from engine.files import CONFIG, METRICS
from engine.monitoring.records import read_records
from engine.planning.hardware import Hardware
from engine.planning.memory import OFFLOADS
from engine.planning.plan import Plan, Way
from engine.planning.step_trace import Cost
from engine.planning.traffic import Collective, sent_bytes
from engine.recipes.load import load_config
from engine.zero.geometry import BYTES

_FIRST = 5  # steps in which libraries are loaded and kernels are chosen


class StepTime(NamedTuple):
    """Seconds of an optimizer step. Communication is what is not hidden behind compute."""

    forward: float
    backward: float
    gradients: float  # exposed
    weights: float  # exposed
    statistics: float  # of batch norms over all ranks
    other: float  # flags, norms, records
    optimizer: float
    window: float  # AGVM's share of a mean step
    sent: float  # bytes a rank sends in a step without a window

    @property
    def total(self) -> float:
        return sum(self[:-1])

    @property
    def communication(self) -> float:
        return self.gradients + self.weights + self.statistics + self.other


class RunTime(NamedTuple):
    step: StepTime
    steps: int
    evaluation: float | None  # seconds in all; None where the number of validation images is not known
    checkpoints: float
    images_per_second: float
    world: int

    @property
    def hours(self) -> float:
        return (self.steps * self.step.total + (self.evaluation or 0.0) + self.checkpoints) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.world


def compute_seconds(costs: Counter[Cost], hardware: Hardware) -> float:
    share = hardware.efficiency
    bandwidth = share * hardware.memory_bandwidth
    return sum(
        count * max(hardware.launch, cost.flops / (share * hardware.peak(cost.dtype)), cost.bytes / bandwidth)
        for cost, count in costs.items()
    )


def collective_seconds(op: str, payload: int, world: int, hardware: Hardware) -> float:
    if world == 1:
        return 0.0
    return hardware.latency * math.log2(world) + sent_bytes(op, payload, world) / hardware.bus(world)


def _compute(plan: Plan, hardware: Hardware, recompute: bool) -> tuple[float, float]:
    """Forward and backward of a micro-batch on the slowest rank, on the line through two traced sizes."""
    small, large = plan.trace(plan.sizes.mean), plan.trace(plan.sizes.largest)
    ends = [[compute_seconds(costs, hardware) for costs in (trace.forward, trace.backward)] for trace in (small, large)]
    apart = large.size.pixels - small.size.pixels
    share = (plan.sizes.slowest(plan.world) - small.size.pixels) / apart if apart else 0.0
    forward, backward = (first + share * (second - first) for first, second in zip(*ends))
    if recompute != plan.way.recompute:
        # Only the largest size is traced both ways: the ratio there holds for the others.
        other = plan.trace(plan.sizes.largest, recompute=recompute)
        backward *= compute_seconds(other.backward, hardware) / ends[1][1]
    return forward, backward


def step_time(plan: Plan, hardware: Hardware, way: Way | None = None) -> StepTime:
    """In the config's own way, or in another."""
    stage, offload, recompute = way or plan.way
    settings, world, steps = plan.settings(stage), plan.world, plan.batch.accumulation
    forward, backward = (steps * seconds for seconds in _compute(plan, hardware, recompute))
    largest = plan.trace(plan.sizes.largest)
    traffic = plan.traffic(settings, [event.parameter for event in largest.gradients])

    def seconds(chosen: Iterable[Collective]) -> float:
        return sum(
            c.times(steps, window=True) * (hardware.latency * math.log2(world) + c.sent(world) / hardware.bus(world))
            for c in chosen
        )

    usual = [c for c in traffic if "window" not in c.when]
    gradients = seconds(c for c in usual if c.purpose == "gradients")
    hidden = 0.0
    if settings.overlap_comm and settings.stage and not settings.whole_gradient:
        # Stage 1 reduces during the last backward of a step, the others during every one.
        hidden = min(gradients, backward / steps if settings.stage == 1 else backward)
    weights = seconds(c for c in usual if c.purpose == "weights" and c.when == "boundary")
    fetches = [c for c in usual if c.purpose == "weights" and c.when == "micro-step"]
    # Gradients and weights use the same links: the time that hides gradients cannot hide weights too.
    free = forward + backward - hidden if settings.prefetch_bucket_size else 0.0
    weights += max(0.0, seconds(fetches) - free)
    if offload == OFFLOADS[2]:  # this rank's part of every gather comes from the host first, while nothing else is done
        weights += sum(c.times(steps) * c.bytes for c in fetches) / world / hardware.host_bandwidth
    return StepTime(
        forward,
        backward,
        gradients - hidden,
        weights,
        steps * sum(n * collective_seconds(*call, world, hardware) for call, n in largest.collectives.items()),
        seconds(c for c in usual if c.purpose not in ("gradients", "weights")),
        _optimizer_seconds(plan, hardware, stage, offload),
        seconds(c for c in traffic if c.when == "window") / int(plan.config.optimizer.params.get("tau", 10)),
        sum(c.times(steps) * c.sent(world) for c in usual),
    )


def _optimizer_seconds(plan: Plan, hardware: Hardware, stage: int, offload: str) -> float:
    """Reading and writing weights and moments, and reading gradients; over the host's link where they are offloaded."""
    share = plan.model.trained / (plan.world if stage else 1)
    size = 4 * (3 + 2 * plan.moments)
    if offload == "none":
        return share * size / (hardware.efficiency * hardware.memory_bandwidth)
    # Gradients down and weights up over the link; the rule itself runs on the host at about its speed.
    return share * (2 * BYTES[plan.dtype] + size) / hardware.host_bandwidth


def run_time(plan: Plan, hardware: Hardware, step: StepTime | None = None) -> RunTime:
    """Of the config's own setting, or of another whose step is given."""
    step = step or step_time(plan, hardware)
    settings, epochs = plan.config.run, plan.steps / plan.steps_per_epoch
    forward = compute_seconds(plan.trace(plan.sizes.mean).forward, hardware) / plan.batch.micro
    evaluations = _occasions(settings.eval_interval, epochs)
    evaluation: float | None = 0.0
    if evaluations:
        val = plan.data.val
        evaluation = None if val is None else evaluations * math.ceil(val / plan.world) * forward
    size = plan.model.total * BYTES[plan.dtype] + plan.model.trained * 4 * (1 + plan.moments)
    checkpoints = _occasions(settings.checkpoint_interval, epochs) * size / hardware.disk
    return RunTime(step, plan.steps, evaluation, checkpoints, plan.batch.total / step.total, plan.world)


def _occasions(interval: float | None, epochs: float) -> int:
    """How often something happens that is due every `interval` epochs (None: only at the end, 0: never)."""
    if interval == 0:
        return 0
    return 1 if interval is None else max(1, math.ceil(epochs / interval))


def calibrated(plan: Plan, hardware: Hardware, measured: float) -> Hardware:
    """The hardware whose efficiency makes the planned step take as long as a measured one."""
    if not 0 < measured < float("inf"):
        raise UserError(f"a measured step must take more than 0 seconds, got {measured:g}")
    low, high = 1e-4, 1.5

    def seconds(share: float) -> float:
        return step_time(plan, replace(hardware, efficiency=share)).total

    if not seconds(high) < measured < seconds(low):
        raise UserError(
            f"a step of {measured:g} s cannot be: on {plan.world} x {hardware.name} it takes between "
            f"{seconds(high):.3g} and {seconds(low):.3g} s whatever share of the peak is reached"
        )
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured else (low, middle)
    return replace(hardware, efficiency=math.sqrt(low * high))


def calibrate_from_run(folder: str, hardware: Hardware, **given: Any) -> Hardware:
    """From the median step of a run, its first steps left out, and the config saved with it. `given` is what `Plan` is
    told of data that is not on this machine."""
    metrics, config_file = Path(folder) / METRICS, Path(folder) / CONFIG
    for path in (metrics, config_file):
        if not path.is_file():
            raise UserError(f"--calibrate {folder}: there is no {path.name} in it: give the work dir of a run")
    seconds = [record["seconds"] for record in read_records(metrics) if "seconds" in record]
    if not seconds:
        raise UserError(f"--calibrate {folder}: its metrics.jsonl has no step yet: let the run make some steps first")
    config = load_config(str(config_file))
    total, micro, accumulation = (config.deepspeed[key] for key in KEYS)
    plan = Plan(config, total // (micro * accumulation), **given)
    return calibrated(plan, hardware, statistics.median(seconds[_FIRST:] or seconds))
