"""Sharpness-aware minimisation with any optimizer: two passes over the micro-batches of an optimizer step.

    e = rho g / |g|       g is the gradient of the whole batch at w, |g| its norm over all parameters and ranks
    the optimizer's step at w, with the gradient at w + e

The move from w to w + e is a step of DeepSpeed's own wrapper in which the optimizer adds e instead of its update. So
gradients are unscaled, weights gathered and gradients cleared as in any step, at every stage and precision. The master
weights are copied before the move and copied back, exactly, before the real step: one more copy of this rank's share of
them (4 bytes per parameter, divided by the number of ranks at stages 1 to 3). The model's own weights are updated by
the real step, which gathers them anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from engine.optim.agvm import AGVMOptimizer
from engine.zero.layout import Layout
from engine.zero.slices import Slices, gradient_norm, slice_limit, whole_fragments
from engine.zero.support import refuse_unsupported


class SharpnessAware:
    """Call `keep` before each micro-batch of the first pass, and `step` after its backward instead of the engine's.

    Both passes see the same samples, augmented once. Buffers, such as batch-norm statistics, keep their values of the
    first pass. AGVM measures in the second pass, whose gradient the step uses.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, layout: Layout, rho: float) -> None:
        refuse_unsupported(engine, "SAM")
        self.engine, self.optimizer, self.layout, self.rho = engine, optimizer, layout, rho
        self.slices = Slices(layout, whole_fragments(layout), slice_limit(torch.device(engine.device)))
        self._batches: list[Any] = []

    def keep(self, batch: Any) -> Any:
        """Keep a micro-batch for the second pass. Returns a copy for the forward pass: a model may change its input."""
        self._measure_variance(False)
        self._batches.append(batch)
        return copy.deepcopy(batch)

    def step(self, again: Callable[[int, Any], int]) -> int:
        """Count a micro-step. After the last one: move to w + e, call `again` with the number and the content of each
        micro-batch, and let the optimizer step. Returns the sum of its results."""
        engine, total = self.engine, 0
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
            return total
        weights = {k: shard.detach().clone() for k, shard in self.layout.shards().items()}
        buffers = [buffer.clone() for buffer in engine.module.buffers()]
        self._climb()
        engine.micro_steps -= len(self._batches) - 1
        self._measure_variance(True)
        for k, batch in enumerate(self._batches):
            total += again(k, batch)
            if k == len(self._batches) - 1:
                with torch.no_grad():
                    for i, shard in self.layout.shards().items():
                        shard.copy_(weights.pop(i))
                    for buffer, before in zip(engine.module.buffers(), buffers):
                        buffer.copy_(before)
            engine.step()
        self._batches = []
        if not engine.was_step_applied():  # an overflow: the model's weights are still at w + e
            self.layout.publish()
        return total

    def _measure_variance(self, allowed: bool) -> None:
        if isinstance(self.optimizer, AGVMOptimizer):
            self.optimizer.modulator.paused = not allowed

    @torch.no_grad()
    def _climb(self) -> None:
        """Move w to w + e and clear the gradients. A gradient that is zero or not finite leaves w where it is."""
        self.layout.settle()
        norm = gradient_norm(self.slices)
        length = norm * self.layout.factors(norm)[0]  # of the unscaled gradient
        alpha = self.rho / length if 0 < length < float("inf") else None

        def climb() -> None:
            groups = self.optimizer.param_groups
            for p in (p for group in groups for p in group["params"] if p.grad is not None):
                if alpha is not None:
                    p.add_(p.grad, alpha=alpha)

        self.layout.step_with(climb, self.optimizer)
