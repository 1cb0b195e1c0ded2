"""The base class of all our update rules: the loop over param groups, and updates in small batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BATCH = 1 << 22  # elements


class Rule(torch.optim.Optimizer):
    """A rule implements `update`.

    The base classes in between (`LayerwiseOptimizer`, `AGVMOptimizer`) extend the other methods and always call
    `super()`. So a rule can inherit from both, and neither knows the other.
    """

    modulated = False  # whether AGVM's factors multiply the learning rate
    sums_per_layer = 0  # how many sums over a whole layer the rule needs before a step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        # Under ZeRO this runs once per param group or sub-group, so several times per optimizer step.
        # Therefore it counts and measures nothing.
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
        """Called before the first group steps; False if there is nothing to do."""
        return True

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate of this step. The schedule owns `group["lr"]`."""
        return group["lr"]

    def update(self, group: dict[str, Any], params: list[Tensor], lr: float) -> None:
        """One step on `params`, which all have gradients, at learning rate `lr`."""
        raise NotImplementedError

    @property
    def observer(self) -> Any:
        """Who must be told of gradients that do not come one by one (`engine.zero.complete_gradients`), or None."""
        return None

    def attach(self, engine: Any) -> None:
        """Connect to a DeepSpeed engine; call it once, right after `deepspeed.initialize`."""

    def detach(self) -> None:
        """Disconnect from the engine."""


def check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0, got {value}")


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def pieces(limit: int, *tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Cut aligned lists of tensors into batches of about `limit` elements; yields their indices and their pieces.

    A rule works batch by batch to keep its temporaries small: under ZeRO a shard can have gigabytes.
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
