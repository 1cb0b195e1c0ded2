"""The engine's promises on this hardware: sharded AGVM is its twin, all stages are alike, a resumed run is the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine import distributed
from engine.doctor.finding import Finding, Skipped, compared
from engine.doctor.small_run import (
    TAU,
    TwinRun,
    distance,
    full_precision,
    relative,
    small_run,
)

STEPS = 6
STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-5  # fp32 sums in another order: some 1e-7 on two ranks, more on hundreds


class Trace(NamedTuple):
    """phi and mu after every step, and the weights at the end."""

    phi: list[dict[str, float]]
    mu: list[dict[str, float]]
    weights: list[Tensor]


def twin_trace() -> Trace:
    with full_precision():
        plain, phi, mu = TwinRun(), [], []
        for step in range(1, STEPS + 1):
            plain.step(step)
            phi.append(dict(plain.twin.phi))
            mu.append(dict(plain.twin.mu))
        return Trace(phi, mu, plain.weights())


@dataclass
class StageProofs:
    """One short run per stage, compared with the twin; the weights are kept to compare the stages."""

    weights: dict[int, list[Tensor]] = field(default_factory=dict)
    twin: Trace | None = None  # on rank 0, the same for all stages

    def follows_twin(self, stage: int) -> Finding:
        phi, mu = [], []
        with small_run(stage) as run:
            for step in range(1, STEPS + 1):
                run.train(step)
                phi.append(dict(run.optimizer.phi))
                mu.append(dict(run.optimizer.mu))
            weights, windows = run.weights(), run.optimizer.agvm_state_dict()["windows"]
        self.weights[stage] = weights
        measured: dict[str, float] = {}
        if distributed.rank() == 0:  # the twin computes all ranks' micro-batches: once is enough
            plain = self.twin = self.twin or twin_trace()
            measured = {
                "phi": max(map(relative, phi, plain.phi)),
                "mu": max(map(relative, mu, plain.mu)),
                "weights": distance(weights, plain.weights),
            }
        measured = distributed.broadcast_object(measured)
        if windows != STEPS // TAU:
            return Finding(f"phi was measured in {windows} windows instead of {STEPS // TAU}", False)
        return compared(measured, TOLERANCE, steps=STEPS, mu=mu[-1], phi=phi[-1])

    def stages_alike(self) -> Finding:
        missing = [stage for stage in STAGES if stage not in self.weights]
        if missing:
            raise Skipped(f"stage {', '.join(map(str, missing))} did not end")
        first = self.weights[STAGES[0]]
        return compared({f"0-{stage}": distance(self.weights[stage], first) for stage in STAGES[1:]}, TOLERANCE)


def resumes_alike(stage: int, folder: Path) -> Finding:
    """Save in passing, go on; then resume from there in a run that began elsewhere. Every bit must be the same."""
    half, end = STEPS // 2, STEPS - 1  # the window before the save and the one after it lie on both sides
    with small_run(stage) as run:
        run.train(half)
        run.save(folder)
        run.train(end)
        straight, mu = run.weights(), dict(run.optimizer.mu)
    with small_run(stage, seed=2) as run:
        run.resume(folder)
        run.train(end)
        resumed, resumed_mu = run.weights(), dict(run.optimizer.mu)
    different = sum(int((a != b).sum()) for a, b in zip(straight, resumed))
    total = sum(tensor.numel() for tensor in straight)
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in straight)
    passed = different == 0 and mu == resumed_mu and finite
    return Finding(
        f"{different} of {total} weights differ after {end - half} more steps (at most 0, bit for bit), "
        f"mu {'the same' if mu == resumed_mu else 'differs'}",
        passed,
        {"distance": distance(resumed, straight), "mu": mu, "resumed_mu": resumed_mu},
    )
