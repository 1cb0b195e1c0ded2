"""Memory of one GPU, from a traced micro-step and DeepSpeed's rules for where weights, gradients and moments are kept.

Read off DeepSpeed 0.19.8, compared with real ranks (benchmarks/plan_against_measured.py). N ranks, T trained elements:

    stage   weights      master       moments      gradients
    0       all          (half: T)    T            T, once more in one flat tensor while they are reduced
    1       all, flat    T / N        T / N        T
    2       all, flat    T / N        T / N        of the parameters that touch this rank's partition
    3       T / N        T / N        T / N        T / N, and whole parameters while they are used

BF16_Optimizer (bf16 at stage 1, gradients added up in fp32) holds T gradients in fp32 all the time, beside those of
backward. Offloading moves master weights, moments, reduced gradients and the average of the weights to the host.

The peak is the highest of forward, backward (replayed gradient by gradient), reduction and optimizer step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine.planning.gathers import Gathers
from engine.planning.model_facts import ModelFacts, plan_shards
from engine.planning.step_trace import StepTrace
from engine.planning.traffic import FALLBACK_BUCKET
from engine.zero.geometry import BYTES
from engine.zero.settings import CommunicationSettings

OFFLOADS = ("none", "optimizer", "optimizer+parameters")
_RULE_BATCH = 1 << 22  # elements that our update rules work on at a time (engine/optim)
_RULE_TEMPORARIES = 2


@dataclass
class Memory:
    """Bytes on one GPU; `host` is what offloading puts into the host's memory for each rank."""

    parts: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.phases.values())


@dataclass
class MemoryPlan:
    """`moments` counts the optimizer's tensors of a parameter's size. `average` is run.ema: one more fp32 copy of this
    rank's share."""

    trace: StepTrace
    model: ModelFacts
    settings: CommunicationSettings
    moments: int
    offload: str = OFFLOADS[0]
    average: bool = False

    def __post_init__(self) -> None:
        self.size = BYTES[self.settings.dtype]
        self.geometry = plan_shards(self.model.parameters, self.settings.sharding).geometry
        sizes = self.geometry.shard_sizes()
        self.share = sum(sizes)
        self.largest_group = max(sizes) if self.settings.stage else self.model.trained
        # BF16_Optimizer's gradients, which are there all the time.
        self.fp32_gradients = 4.0 * self.model.trained if self.settings.stage and self.settings.whole_gradient else 0.0

    def memory(self) -> Memory:
        s, share = self.settings, self.share
        parts: dict[str, float] = {}  # in the order of the columns of engine/planning/report.py
        whole_forward = whole_backward = 0
        weights = self.model.total
        if s.stage == 3:
            gathers = Gathers(self.model, s)
            whole_forward, whole_backward = self.size * gathers.forward, self.size * gathers.backward
            persistent = sum(self.model.parameters[i].numel for i in gathers.persistent)
            weights = share + persistent + sum(-(-p.numel // s.world) for p in self.model.parameters if not p.trained)
        parts["weights"] = self.size * weights + self.model.buffers
        parts["gradients"] = self.size * self._gradient_elements() + self.fp32_gradients
        parts["master weights"] = 4 * share if s.stage > 0 or s.dtype != "float32" else 0
        parts["moments"] = 4 * self.moments * share
        parts["average"] = 4 * share if self.average else 0
        parts["AGVM window"] = self._window()
        parts["buckets"] = self._buckets()
        parts["gathered weights"] = max(whole_forward, whole_backward)
        parts["activations"] = self.trace.peak
        memory = Memory(parts)
        if self.offload != "none":
            memory.host = parts["master weights"] + parts["moments"] + parts["average"] + 4 * share
            parts["master weights"] = parts["moments"] = parts["average"] = 0.0
            if s.stage >= 2:
                parts["gradients"] = 0.0
            if self.offload == OFFLOADS[2]:
                memory.host += self.size * share
                parts["weights"] -= self.size * share
        base = parts["weights"] + parts["master weights"] + parts["moments"] + parts["average"] + self.fp32_gradients
        held = parts["gradients"] - self.fp32_gradients
        if s.stage == 3:
            base, held = base + parts["gradients"] + parts["buckets"], 0.0
        several = s.accumulation > 1 and s.stage < 3
        before = base + (held if several else 0.0)  # with the gradients of earlier micro-steps
        phases = memory.phases
        phases["forward"] = before + self.trace.forward_peak + whole_forward
        phases["backward"] = before + parts["AGVM window"] + self._backward(several) + whole_backward
        if s.whole_gradient:
            size = 4 if s.stage else self.size
            phases["reduction"] = base + held + size * min(self.model.trained, FALLBACK_BUCKET)
        phases["step"] = base + held + (self._step_temporaries() if self.offload == "none" else 0.0)
        return memory

    def _gradient_elements(self) -> int:
        """Elements of gradients that stay until the step."""
        if self.settings.stage != 2:
            return self.share if self.settings.stage == 3 else self.model.trained
        touched: Counter[int] = Counter()  # by rank, of all parameters that it owns a part of
        for i, numel in enumerate(self.geometry.numels):
            touched.update({rank: numel for rank, _, _ in self.geometry.ranges(i)})
        return max(touched.values())

    def _buckets(self) -> float:
        s = self.settings
        if s.whole_gradient:
            return 0.0
        # Two where gradients are reduced on a stream of their own.
        elements = s.reduce_bucket_size * (2 if s.overlap_comm and s.stage < 3 else 1)
        if self.offload != "none" and s.stage < 3:  # gradients go to the host through one more, one at a time
            elements += max(p.numel for p in self.model.parameters if p.trained)
        return self.size * elements

    def _window(self) -> float:
        """Of the first window, which must fit too: it also captures the plain gradient, to check itself."""
        if self.model.window is None:
            return 0.0
        s, (kind, bucket_size) = self.settings, self.model.window
        share = self.share if s.stage else -(-self.model.trained // s.world)
        bucket = min(bucket_size, self.model.trained)
        plain, halves = BYTES[s.communication_dtype], s.halves
        # A copy of DeepSpeed's own sums stays in their type (engine/zero/capture.py).
        copied = 4 if s.fp32_accumulation else self.size
        signed = (copied if halves.copied_after is not None else plain) * share
        if halves.reduced_at is not None:
            signed += plain * bucket * (1 if len(halves.senders[0]) == s.world else 2)
        squared = 4 * share + 4 * bucket  # all ranks send: half of a bucket's room is enough
        check = 4 * share + plain * bucket
        return check + {"norms": 0, "signed": signed, "squared": squared}[kind]

    def _backward(self, several: bool) -> float:
        """The highest of activations, buckets and gradients over backward, beyond what is always there."""
        s, peak, held = self.settings, 0.0, 0.0
        fixed = self._buckets() if s.stage in (1, 2) else 0.0
        waiting, elements, partition = 0.0, 0, 0.0
        for event in self.trace.gradients:
            peak = max(peak, fixed + held + partition + waiting + event.peak)
            numel = self.model.parameters[event.parameter].numel
            if s.stage < 2:
                held += 0.0 if several else event.bytes
                continue
            if elements + numel > s.reduce_bucket_size:
                # The first reduction allocates the gradients of the partition.
                if s.stage == 2 and elements and not several and self.offload == "none":
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
