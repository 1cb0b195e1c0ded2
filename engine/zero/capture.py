"""Tensor hooks that capture the gradient of each micro-batch in AGVM's windows.

A tensor hook on a parameter fires before gradient accumulation. So at every stage it sees the raw local gradient u / K
(DeepSpeed divides the loss by K). Outside a window it returns at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.buckets import make_plan
from engine.zero.companion import Companion, Lane
from engine.zero.geometry import reduced_once
from engine.zero.layout import Layout, squared_norm


class Capture:
    """The micro-batch gradients of one window.

    `kind` says what is kept: `signed` and `squared` keep a reduced vector, `norms` one squared norm per parameter.
    Rank r computes micro-batch j = k N + r at micro-step k. Even j form the first half and have the sign
    s[j] = R / (2 n1), odd j the second half with s[j] = -R / (2 n2), so that  d = (1/R) sum s[j] u[j].
    """

    def __init__(
        self,
        layout: Layout,
        group: Any,
        *,
        kind: str,
        accumulation: int,
        bucket_size: int,
        device: torch.device,
        dtype: torch.dtype,
        in_window: Callable[[], bool],
    ) -> None:
        self.layout, self.group, self.kind, self.K, self.bucket_size = layout, group, kind, accumulation, bucket_size
        self.device, self.dtype, self.in_window = device, dtype, in_window
        self.R = layout.world * accumulation
        self.once = reduced_once(kind, keeps_local=layout.keeps_local, world=layout.world, accumulation=accumulation)
        # Until the first backward shows the real order: backward runs roughly in reverse order of definition.
        self.fires: dict[int, int] = {}
        self.plan = make_plan(layout.geometry, range(len(layout.params))[::-1], bucket_size)
        self.trace: list[int] | None = []
        self.traced: list[int] | None = None
        self.checking = True
        self.close()
        self.handles = [p.register_hook(self._hook(i)) for i, p in enumerate(layout.params)]

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.trace is not None:
                self.trace.append(i)
            if self.in_window():
                self.take(i, gradient)

        return hook

    def close(self) -> None:
        """End the window and free its memory."""
        self.micro = 0
        self.fired = [0] * len(self.layout.params)
        self.fired_now: set[int] = set()
        self.companion: Companion | None = None
        self.lane: Lane | None = None
        self.plain: Lane | None = None
        self.norms: Tensor | None = None
        self.is_open = self.broken = False

    def _open(self) -> None:
        self.is_open = True
        lane = partial(Lane, self.plan, dtype=self.dtype, device=self.device, once=self.once or self.K == 1)
        if self.kind == "norms":
            self.norms = torch.zeros(len(self.layout.params), dtype=torch.float64, device=self.device)
        else:
            self.lane = lane(squared=self.kind == "squared")
        if self.checking:
            self.plain = lane(squared=False)
        lanes = [x for x in (self.lane, self.plain) if x is not None]
        self.companion = Companion(self.layout.geometry, self.plan, self.group, lanes, self.fires) if lanes else None

    def sign(self, micro_step: int) -> float:
        """s[j] of this rank's micro-batch at a micro-step."""
        n1, n2 = (self.R + 1) // 2, self.R // 2
        even = (micro_step * self.layout.world + self.layout.rank) % 2 == 0
        return self.R / (2 * n1) if even else -self.R / (2 * n2)

    def weights(self) -> list[float]:
        """One weight per lane. Hooks see x = u / K: d is the sum of s/N x, and Q, the mean of u^2, that of K/N x^2."""
        N = self.layout.world
        weight = self.K / N if self.kind == "squared" else self.sign(self.micro) / N
        return [weight] * (self.lane is not None) + [1 / N] * (self.plain is not None)

    def take(self, i: int, gradient: Tensor) -> None:
        if not self.is_open:
            self._open()
        again = i in self.fired_now
        self.fired[i] += 1
        self.fired_now.add(i)
        if self.norms is not None:
            # Reentrant checkpointing can deliver a gradient in parts, and squared norms of parts do not add up.
            self.broken |= again
            self.norms[i] += squared_norm(gradient)
        if self.once and self.micro < self.K - 1:
            return
        if self.companion is not None:
            earlier = self.layout.local_sum(i) if self.once and not again else None
            self.companion.put(i, self.weights(), *([gradient] if earlier is None else [earlier, gradient]))

    def end_micro_step(self) -> None:
        """Call it when the backward of a micro-step is over, before DeepSpeed reduces what it has accumulated."""
        if self.trace:
            self.traced, self.trace = self.trace, None
        if not self.in_window():
            return
        if not self.is_open:
            self._open()
        if self.companion is not None and (not self.once or self.micro == self.K - 1):
            if self.once:
                for i, count in enumerate(self.fired):
                    earlier = self.layout.local_sum(i) if count and i not in self.fired_now else None
                    if earlier is not None:
                        self.companion.put(i, self.weights(), earlier)
            self.companion.end_micro_step(self.weights())
        self.micro += 1
        self.fired_now = set()

    def finish(self, norm_squared: Tensor) -> tuple[list[bool], float, str | None]:
        """Before the optimizer step: which parameters got a gradient on any rank, |g|, and the reason if the window
        cannot be used. One all-reduce of flags and norm, and one more reduction if a gradient came out of order."""
        n, companion = len(self.layout.params), self.companion
        late = set().union(*(lane.late for lane in companion.lanes)) if companion is not None else set()
        flags = torch.zeros(2 * n + 3, dtype=torch.float64)
        flags[:n] = torch.tensor(self.fired, dtype=torch.float64)
        flags[[n + i for i in late]] = 1
        flags[2 * n :] = torch.tensor(
            [float(norm_squared), self.micro != self.K, self.broken or (companion is not None and companion.broken)]
        )
        if companion is not None:
            companion.finish()
        flags = self.all_reduce(flags.to(self.device)).cpu()
        if companion is not None:
            companion.reduce_late([i for i in range(n) if flags[n + i] > 0], self.bucket_size)
        reason = None
        if flags[2 * n + 1] > 0:
            reason = f"a rank ran {self.micro} backward passes instead of {self.K} (gradient_accumulation_steps)"
        elif flags[2 * n + 2] > 0:
            reason = "a gradient came in parts"
        return [bool(x > 0) for x in flags[:n]], float(flags[2 * n].sqrt()), reason

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.layout.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def agree_on_order(self) -> None:
        """Once, after the first backward: plan the buckets in the order in which gradients came on rank 0."""
        if self.traced is None:
            return
        n = len(self.layout.params)
        # For each parameter: when its last gradient came (those without one go to the end), and how many came.
        order = torch.full((2, n), len(self.traced), dtype=torch.int64)
        order[1] = 0
        for place, i in enumerate(self.traced):
            order[0, i] = place
            order[1, i] += 1
        if self.layout.world > 1:
            order = order.to(self.device)
            dist.broadcast(order, group_src=0, group=self.group)
            order = order.cpu()
        self.traced = None
        self.fires = {i: max(1, int(count)) for i, count in enumerate(order[1])}
        self.plan = make_plan(self.layout.geometry, sorted(range(n), key=lambda i: int(order[0, i])), self.bucket_size)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.group is not None:
            dist.destroy_process_group(self.group)
