"""What every update rule of ours shares: the loop over param groups, and its work in small batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BATCH = 1 << 22


class Rule(torch.optim.Optimizer):
    """A rule gives `update`. Classes between it and a rule add what they need around these methods: each calls
    `super()`, so that a rule of layers and AGVM's modulator meet in one class without knowing each other."""

    modulated = False  # whether AGVM's factors are on the learning rate
    sums_per_layer = 0  # numbers that the rule needs of every whole layer before a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        # Under ZeRO this runs once per param group or sub-group of an iteration, so it counts and measures nothing.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups if self.begin() else ():
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.update(group, params, self.rate(group))
        return loss

    def begin(self) -> bool:
        """What has to be known before the first group steps; False where there is nothing to do."""
        return True

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate of this step. The schedule owns `group["lr"]`."""
        return group["lr"]

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        """One step on `params` (all with gradients) at learning rate `lr`."""
        raise NotImplementedError

    def attach(self, engine: Any) -> None:
        """Follow a DeepSpeed engine from here on; call it once, right after `deepspeed.initialize`."""

    def detach(self) -> None:
        """Follow it no longer."""


def count_adam_step(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The state of each parameter, with Adam's moments made where there are none yet, and its step counted."""
    states = [optimizer.state[p] for p in params]
    for p, state in zip(params, states):
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        # A Python int: DeepSpeed 0.19.8's universal ZeRO-3 load shares one `step` tensor between all sub-groups,
        # which would then count once for each of them.
        state["step"] = int(state["step"]) + 1
    return states


def pieces(limit: int, *tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Cut aligned lists of tensors into batches of about `limit` elements: which tensors, and their pieces.

    A rule works batch by batch, so that its temporaries stay small: ZeRO hands it shards of gigabytes.
    """
    index: list[int] = []
    batch: list[list[Tensor]] = [[] for _ in tensors]
    held = 0
    for i, aligned in enumerate(zip(*tensors)):
        cut = aligned[0].numel() > limit and all(t.is_contiguous() for t in aligned)
        for part in zip(*(t.view(-1).split(limit) for t in aligned)) if cut else [aligned]:
            index.append(i)
            for column, tensor in zip(batch, part):
                column.append(tensor)
            held += part[0].numel()
            if held >= limit:
                yield index, batch
                index, batch, held = [], [[] for _ in tensors], 0
    if index:
        yield index, batch
