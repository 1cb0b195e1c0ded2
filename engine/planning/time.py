"""Seconds of a step, and hours of a run.

Compute: every operator of the traced step takes the longest of its arithmetic, its memory traffic and a launch, at the
card's achievable share. Ranks wait for the one with the most pixels. Communication: every collective of
`engine/planning/traffic.py` in a ring over the slowest link, plus a latency that grows with the logarithm of the ranks;
what DeepSpeed overlaps with backward counts where it is longer than that. Loading of images and the start of the processes
are not in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import UserError
from engine.planning.hardware import Hardware
from engine.planning.memory import OFFLOADS
from engine.planning.settings import window_settings
from engine.planning.step_trace import Cost, StepTrace
from engine.planning.traffic import Collective, sent_bytes
from engine.zero.geometry import BYTES

if TYPE_CHECKING:
    from engine.planning.plan import Plan


@dataclass(frozen=True)
class StepTime:
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
        return (
            self.forward
            + self.backward
            + self.gradients
            + self.weights
            + self.statistics
            + self.other
            + self.optimizer
            + self.window
        )

    @property
    def communication(self) -> float:
        return self.gradients + self.weights + self.statistics + self.other


@dataclass(frozen=True)
class RunTime:
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
    return sum(
        count
        * max(
            hardware.launch,
            cost.flops / (share * hardware.peak(cost.dtype)),
            cost.bytes / (share * hardware.memory_bandwidth),
        )
        for cost, count in costs.items()
    )


def collective_seconds(op: str, payload: int, world: int, hardware: Hardware) -> float:
    if world == 1:
        return 0.0
    return hardware.latency * math.log2(world) + sent_bytes(op, payload, world) / hardware.bus(world)


def _at_pixels(small: StepTrace, large: StepTrace, pixels: float, hardware: Hardware) -> tuple[float, float]:
    """Forward and backward of a micro-batch, on the line through two traced sizes."""
    ends = [[compute_seconds(costs, hardware) for costs in (trace.forward, trace.backward)] for trace in (small, large)]
    apart = large.height * large.width - small.height * small.width
    share = (pixels - small.height * small.width) / apart if apart else 0.0
    forward, backward = (first + share * (second - first) for first, second in zip(*ends))
    return forward, backward


def step_time(
    plan: Plan,
    hardware: Hardware,
    *,
    stage: int | None = None,
    recompute: bool | None = None,
    offload: str | None = None,
) -> StepTime:
    settings = plan.settings(stage)
    world, steps = plan.world, plan.batch.accumulation
    small, large = plan.trace(plan.sizes.mean), plan.trace(plan.sizes.largest)
    pixels = plan.sizes.slowest(world)
    forward, backward = (steps * seconds for seconds in _at_pixels(small, large, pixels, hardware))
    if recompute is not None and recompute != plan.recomputed:
        # Only the largest size is traced both ways: the ratio there holds for the others.
        other = plan.trace(plan.sizes.largest, recompute=recompute)
        backward *= compute_seconds(other.backward, hardware) / compute_seconds(large.backward, hardware)
    kind, params = plan.config.optimizer.type, plan.config.optimizer.params
    window = window_settings(kind, params)
    traffic = plan.traffic(settings, [event.parameter for event in large.gradients])

    def seconds(collectives: Iterable[Collective]) -> float:
        return sum(
            c.calls * (steps if c.when == "micro-step" else 1) * collective_seconds(c.op, c.bytes, world, hardware)
            for c in collectives
        )

    usual = [c for c in traffic if "window" not in c.when]
    gradients = seconds(c for c in usual if c.purpose == "gradients")
    hidden = min(gradients, backward) if settings.overlap_comm and settings.stage >= 2 else 0.0
    gradients -= hidden
    weights = seconds(c for c in usual if c.purpose == "weights" and c.when == "boundary")
    fetches = [c for c in usual if c.purpose == "weights" and c.when == "micro-step"]
    # Behind the same backward, what hides gradients hides no weights: both go over the same links.
    free = forward + backward - hidden if settings.prefetch_bucket_size else 0.0
    weights += max(0.0, seconds(fetches) - free)
    offload = plan.offload if offload is None else offload
    if offload == OFFLOADS[2]:  # this rank's part of every gather comes from the host first, while nothing else is done
        weights += sum(steps * c.calls * c.bytes for c in fetches) / world / hardware.host_bandwidth
    statistics = steps * sum(
        count * collective_seconds(op, size, world, hardware) for (op, size), count in large.collectives.items()
    )
    other = seconds(c for c in usual if c.purpose not in ("gradients", "weights"))
    extra = seconds(c for c in traffic if c.when == "window")
    return StepTime(
        forward,
        backward,
        gradients,
        weights,
        statistics,
        other,
        _optimizer_seconds(plan, hardware, settings.stage, offload),
        extra / int(params.get("tau", 10)) if window is not None else 0.0,
        sum(c.calls * (steps if c.when == "micro-step" else 1) * sent_bytes(c.op, c.bytes, world) for c in usual),
    )


def _optimizer_seconds(plan: Plan, hardware: Hardware, stage: int, offload: str) -> float:
    """Reading and writing weights and moments, and reading gradients; over the host's link where they are offloaded."""
    trained = sum(p.numel for p in plan.parameters if p.trained)
    share = trained / (plan.world if stage else 1)
    moments = plan.moments
    if offload == "none":
        return share * 4 * (3 + 2 * moments) / (hardware.efficiency * hardware.memory_bandwidth)
    # Gradients down and weights up over the link; the rule itself runs on the host at about its speed.
    return share * (2 * BYTES[plan.dtype] + 4 * (3 + 2 * moments)) / hardware.host_bandwidth


def run_time(plan: Plan, hardware: Hardware, step: StepTime | None = None) -> RunTime:
    """Of the config's own setting, or of another whose step is given."""
    step = step or step_time(plan, hardware)
    settings, epochs = plan.config.run, plan.steps / plan.steps_per_epoch
    forward = compute_seconds(plan.trace(plan.sizes.mean).forward, hardware) / plan.batch.micro
    evaluations = _occasions(settings.eval_interval, epochs)
    if evaluations == 0:
        evaluation = 0.0
    elif plan.data.val is None:
        evaluation = None
    else:
        evaluation = evaluations * math.ceil(plan.data.val / plan.world) * forward
    moments = plan.moments
    total = sum(p.numel for p in plan.parameters)
    trained = sum(p.numel for p in plan.parameters if p.trained)
    size = total * BYTES[plan.dtype] + trained * 4 * (1 + moments)
    checkpoints = _occasions(settings.checkpoint_interval, epochs) * size / hardware.disk
    return RunTime(step, plan.steps, evaluation, checkpoints, plan.batch.total / step.total, plan.world)


def _occasions(interval: float | None, epochs: float) -> int:
    """How often something happens that is due every `interval` epochs (None: only at the end, 0: never)."""
    if interval == 0:
        return 0
    return 1 if interval is None else max(1, math.ceil(epochs / interval))


def calibrated(plan: Plan, hardware: Hardware, measured: float) -> Hardware:
    """The hardware whose achievable share makes the planned step take as long as a measured one."""
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
