"""What every update rule of ours shares: the loop over param groups, and its work in small batches."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

BATCH = 1 << 22


class Rule(torch.optim.Optimizer):
    """A rule gives `update`. Classes between it and a rule add what they need around these methods: each calls
    `super()`, so that a rule of layers and AGVM's modulator meet in one class without knowing each other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        # Under ZeRO this runs once per param group or sub-group of an iteration, so it counts and measures nothing.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.update(group, params, self.rate(group))
        return loss

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
