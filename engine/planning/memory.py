"""Memory of one GPU, from a traced micro-step and DeepSpeed's rules for where weights, gradients and moments live.

Read off DeepSpeed 0.19.8 and compared with real ranks (benchmarks/plan_against_measured.py). N ranks, T trained elements:

    stage   weights      master       moments      gradients
    0       all          (half: T)    T            T, once more in one flat tensor while they are reduced
    1       all, flat    T / N        T / N        T
    2       all, flat    T / N        T / N        of the parameters that touch this rank's partition
    3       T / N        T / N        T / N        T / N, and whole parameters while they are used

BF16_Optimizer (bf16 at stage 1, gradients added up in fp32) has T gradients in fp32 all the time, beside those of backward.
Offloading moves master weights, moments, reduced gradients and the average of the weights to the host.

The peak is the highest of forward, backward (replayed gradient by gradient), reduction and optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.planning.gathered_memory import Gathered, most_gathered
from engine.planning.settings import WindowSettings
from engine.planning.shards import Parameter, plan_shards
from engine.planning.step_trace import StepTrace
from engine.planning.traffic import persistent_parameters
from engine.zero.geometry import BYTES, Geometry, reduced_once
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings

OFFLOADS = ("none", "optimizer", "optimizer+parameters")
_FALLBACK_BUCKET = 500_000_000  # elements that stage 0 reduces at a time
_RULE_BATCH = 1 << 22  # elements that our update rules work on at a time (engine/optim)
_RULE_TEMPORARIES = 2


@dataclass
class Memory:
    """Bytes on one GPU; `host` is what offloading puts into the host's memory for each rank."""

    stage: int
    offload: str
    parts: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.phases.values())


def plan_memory(
    trace: StepTrace,
    parameters: Sequence[Parameter],
    settings: CommunicationSettings,
    *,
    moments: int,
    window: WindowSettings | None = None,
    offload: str = "none",
    buffers: int = 0,
    uses: Sequence[Use] = (),
    average: bool = False,
) -> Memory:
    """`average` is run.ema: one more fp32 copy of this rank's share."""
    return _Plan(trace, parameters, settings, moments, window, offload, buffers, uses, average).memory()


class _Plan:
    def __init__(
        self,
        trace: StepTrace,
        parameters: Sequence[Parameter],
        settings: CommunicationSettings,
        moments: int,
        window: WindowSettings | None,
        offload: str,
        buffers: int,
        uses: Sequence[Use],
        average: bool,
    ) -> None:
        self.trace, self.parameters, self.settings, self.moments = trace, parameters, settings, moments
        self.window, self.offload, self.buffers, self.uses, self.average = window, offload, buffers, uses, average
        # DeepSpeed's BF16_Optimizer, which is not ZeRO's: it has no buckets and reduces as stage 0 does.
        self.whole_fp32_gradient = settings.stage == 1 and settings.fp32_accumulation
        self.size = BYTES[settings.dtype]
        self.trained = sum(p.numel for p in parameters if p.trained)
        self.total = sum(p.numel for p in parameters)
        self.layout = plan_shards(parameters, settings.sharding)
        sizes = self.layout.geometry.shard_sizes()
        self.share = sum(sizes)
        self.largest_group = max(sizes) if settings.stage else self.trained

    def memory(self) -> Memory:
        s, parts = self.settings, {}
        gathered = Gathered(0, 0)
        persistent = 0
        if s.stage == 3:
            kept = persistent_parameters(self.parameters, s)
            persistent = sum(self.parameters[i].numel for i in kept)
            frozen = sum(-(-p.numel // s.world) for p in self.parameters if not p.trained)
            parts["weights"] = self.size * (self.share + frozen + persistent)
            gathered = most_gathered(self.parameters, s, kept, self.uses)
        else:
            parts["weights"] = self.size * self.total
        parts["weights"] += self.buffers
        sharded = s.stage > 0
        half = s.dtype != "float32"
        parts["master weights"] = 4 * self.share if sharded or half else 0
        parts["moments"] = 4 * self.moments * self.share
        parts["gradients"] = self.size * self._gradient_elements() + self._always_gradient()
        parts["average"] = 4 * self.share if self.average else 0
        parts["gathered weights"] = self.size * max(gathered)
        parts["buckets"] = self._buckets()
        parts["AGVM window"] = self._window()
        parts["activations"] = self.trace.peak
        memory = Memory(s.stage, self.offload, parts)
        if self.offload != "none":
            moved = parts["master weights"] + parts["moments"] + parts["average"] + 4 * self.share
            parts["master weights"] = parts["moments"] = parts["average"] = 0.0
            if s.stage >= 2:
                parts["gradients"] = 0.0
            memory.host = moved
            if self.offload == "optimizer+parameters":
                memory.host += self.size * self.share
                parts["weights"] -= self.size * self.share
        self._phases(memory, gathered)
        return memory

    def _gradient_elements(self) -> float:
        """Elements of gradients that stay until the step."""
        if self.settings.stage < 2:
            return self.trained
        if self.settings.stage == 3:
            return self.share
        return max(_touching(self.layout.geometry))

    def _buckets(self) -> float:
        s = self.settings
        if s.stage == 0 or self.whole_fp32_gradient:
            return 0.0
        # Two on devices that reduce on a stream of their own.
        buckets = self.size * s.reduce_bucket_size * (2 if s.overlap_comm and s.stage < 3 else 1)
        if self.offload != "none" and s.stage < 3:  # through which gradients go to the host, one at a time
            buckets += self.size * max(p.numel for p in self.parameters if p.trained)
        return buckets

    def _always_gradient(self) -> float:
        return 4.0 * self.trained if self.whole_fp32_gradient else 0.0

    def _window(self) -> float:
        """Of the first one, which has to fit too: it captures the plain gradient besides, to check itself."""
        if self.window is None:
            return 0.0
        s, kind = self.settings, self.window.kind
        share = self.share if s.stage else -(-self.trained // s.world)
        bucket = min(self.window.bucket_size, self.trained)
        plain = BYTES[s.communication_dtype]
        # What is reduced once stays in the type it came in (engine/zero/capture.py).
        once = s.accumulation == 1 or reduced_once(
            kind, keeps_local=s.keeps_local, world=s.world, accumulation=s.accumulation
        )
        signed = (plain if once else 4) * share + 2 * plain * bucket
        squared = 4 * share + 2 * 4 * bucket
        return signed + {"norms": 0, "signed": signed, "squared": squared}[kind]

    def _phases(self, memory: Memory, gathered: Gathered) -> None:
        s, parts, trace = self.settings, memory.parts, self.trace
        always = self._always_gradient()
        base = parts["weights"] + parts["master weights"] + parts["moments"] + parts["average"] + always
        if s.stage == 3:
            base += parts["gradients"] + parts["buckets"]
        several = s.accumulation > 1 and s.stage < 3
        gradients = parts["gradients"] - always
        before = gradients if several else 0.0  # of the micro-steps before
        memory.phases["forward"] = base + before + trace.forward_peak + self.size * gathered.forward
        memory.phases["backward"] = (
            base + before + parts["AGVM window"] + self._backward(several) + self.size * gathered.backward
        )
        held = 0.0 if s.stage == 3 else gradients
        if s.stage == 0 or self.whole_fp32_gradient:
            size = 4 if self.whole_fp32_gradient else self.size
            memory.phases["reduction"] = base + held + size * min(self.trained, _FALLBACK_BUCKET)
        device_step = self.offload == "none"
        memory.phases["step"] = base + held + (self._step_temporaries() if device_step else 0.0)

    def _backward(self, several: bool) -> float:
        """The highest of activations, buckets and gradients over backward, beyond what is always there."""
        s, peak, held = self.settings, 0.0, 0.0
        fixed = self._buckets() if s.stage in (1, 2) else 0.0
        waiting, elements, partition = 0.0, 0, 0.0
        for event in self.trace.gradients:
            peak = max(peak, fixed + held + partition + waiting + event.peak)
            numel = self.parameters[event.parameter].numel
            if s.stage < 2:
                held += 0.0 if several else event.bytes
                continue
            if elements + numel > s.reduce_bucket_size:
                if (
                    s.stage == 2 and elements and not several and self.offload == "none"
                ):  # the first reduction lays them out
                    partition = self.size * self._gradient_elements()
                waiting, elements = 0.0, 0
            if numel > s.reduce_bucket_size:
                waiting = event.bytes
            elements += numel
        return max(peak, fixed + held + partition + waiting + self.trace.backward_tail)

    def _step_temporaries(self) -> float:
        """The shard of the largest param group as fp32 gradients, and what the rule works with."""
        flat = 4 * self.largest_group if self.settings.stage or self.settings.dtype != "float32" else 0
        return flat + 4 * _RULE_TEMPORARIES * min(self.largest_group, _RULE_BATCH)


def _touching(geometry: Geometry) -> list[int]:
    """Elements of all parameters that lie on each rank at least in part: ZeRO-2 keeps their reduced gradients whole."""
    held = [0] * geometry.world
    for i, numel in enumerate(geometry.numels):
        for rank, _, _ in geometry.ranges(i):
            held[rank] += numel
    return held
