"""Tensor hooks that see the gradient of each micro-batch, and what AGVM's windows capture with them.

A tensor hook on a parameter fires before gradient accumulation. So at every stage it sees the raw local gradient u / K
(DeepSpeed divides the loss by K). Outside a window it returns at once.

In every window the hooks are counted: each parameter must fire as often as in the backward from which the order was
learnt, or not at all. If not, a gradient may have been counted twice, and the window is not used.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.buckets import make_plan
from engine.zero.companion import Companion, Contribution, Lane
from engine.zero.halves import Halves
from engine.zero.layout import Layout, squared_norm
from engine.zero.processes import new_group
from engine.zero.routes import FromSome, Route, ToOwners

KINDS = ("signed", "squared", "norms")


class Captured(NamedTuple):
    """A finished window: which parameters got a gradient on any rank, |g|, and the reason if it cannot be used."""

    fired: list[bool]
    norm: float
    reason: str | None


class Capture:
    """The micro-batch gradients of one window.

    `kind` says what is kept beside DeepSpeed's gradient g. `signed`: this rank's partition of the first half's share of
    g (`halves.py`). `squared`: the partition of the mean of u^2. `norms`: one squared norm per parameter.
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
        self.layout, self.group, self.K, self.bucket_size = layout, group, accumulation, bucket_size
        self.device, self.dtype, self.in_window = device, dtype, in_window
        self.halves = Halves(layout.world, accumulation, layout.keeps_local)
        self.to_owners = ToOwners(layout.geometry, group)
        self.half_routes: list[Route] | None = None
        self.use(kind)
        # Until the first ordinary backward shows the real order: backward runs roughly in reverse order of definition.
        self.order = list(range(len(layout.params)))[::-1]
        self.plan = make_plan(layout.geometry, self.order, bucket_size)
        self.replan = False
        self.fires: dict[int, int] = {}
        self.learning = True
        self.trace: list[int] | None = []
        self.traced: list[int] | None = None
        self.checking = True
        self.silent = False
        self.places = {id(p): i for i, p in enumerate(layout.params)}
        self.close()
        self.handles = [p.register_hook(self._hook(i)) for i, p in enumerate(layout.params)]

    def use(self, kind: str) -> None:
        """Capture this kind from the next window on; on all ranks, since it may form process groups."""
        self.kind = kind
        if kind == "signed" and self.half_routes is None and self.halves.reduced_at is not None:
            self.half_routes = [self._route(side, senders) for side, senders in enumerate(self.halves.senders)]

    def _route(self, side: int, senders: range) -> Route:
        if len(senders) == self.layout.world:
            return self.to_owners
        members = dist.get_process_group_ranks(self.group)
        among = new_group([members[r] for r in senders]) if len(senders) > 1 else None
        return FromSome(self.layout.geometry, self.group, senders=senders, among=among, sign=-1.0 if side else 1.0)

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.silent:
                return
            if self.trace is not None:
                self.trace.append(i)
            if self.in_window():
                self._take(i, gradient)

        return hook

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Gradients that are computed here and delivered later (`complete_gradients.py`): hooks must not see them."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    def take_all(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """All gradients of this micro-step, as (parameter, gradient): hooks are silent until its end."""
        self.silent = True
        if not self.in_window():
            return
        if not self.is_open:
            self._open()
        known = {self.places[id(p)]: g for p, g in gradients if id(p) in self.places}
        self.delivered = True
        for i in sorted(known, key=self.plan.order.__getitem__):  # then no bucket is launched before it is full
            self._take(i, known[i])

    def listen(self) -> None:
        """A micro-step begins: hooks are heard again, also if the backward before it was broken off."""
        self.silent = False

    def learn_order(self) -> None:
        """Gradients come in another order from now on: learn it from the next backward. The same call on all ranks."""
        self.learning, self.trace, self.traced = True, [], None

    def close(self) -> None:
        """End the window and free its memory."""
        self.micro = 0
        self.fired = [0] * len(self.layout.params)
        self.early: set[int] = set()  # fired in the first micro-step
        self.stale: set[int] = set()
        self.fired_now: Counter[int] = Counter()
        self.uneven: set[int] = set()
        self.companion: Companion | None = None
        self.share: Tensor | None = None
        self.norms: Tensor | None = None
        self.share_lane: Lane | None = None
        self.squares: Lane | None = None
        self.check: Lane | None = None
        self.is_open = False
        self.broken = False
        self.delivered = False

    def _open(self) -> None:
        self.is_open = True
        if self.replan:
            self.plan, self.replan = make_plan(self.layout.geometry, self.order, self.bucket_size), False
        numel, world = self.plan.numel, self.layout.world
        if self.kind == "squared":
            # Hooks see x = u / K, so that the mean of u^2 is the sum of K/N x^2.
            partition = torch.zeros(numel, dtype=torch.float32, device=self.device)
            self.squares = Lane(self.plan, partition, [self.to_owners], dtype=self.dtype, squares=self.K / world)
        elif self.kind == "norms":
            self.norms = torch.zeros(len(self.layout.params), dtype=torch.float64, device=self.device)
        if self.checking:
            partition = torch.zeros(numel, dtype=torch.float32, device=self.device)
            self.check = Lane(self.plan, partition, [self.to_owners], dtype=self.dtype)
        self.companion = Companion(self.layout.geometry, self.plan, self.group, self.device, self.fires)
        self._begin_micro_step()

    def _begin_micro_step(self) -> None:
        assert self.companion is not None
        self.fired_now = Counter()
        self.delivered = False
        share = None
        if self.kind == "signed" and self.micro == self.halves.reduced_at:
            if self.share is None:
                self.share = torch.zeros(self.plan.numel, dtype=self.dtype, device=self.device)
            assert self.half_routes is not None
            share = self.share_lane = Lane(self.plan, self.share, self.half_routes, dtype=self.dtype)
        self.companion.begin([lane for lane in (share, self.squares, self.check) if lane is not None])

    def _contribution(self, lane: Lane, i: int, gradient: Tensor | None) -> Contribution | None:
        """What this rank adds to a lane for parameter i, whose gradient has come (or has not, in this micro-step)."""
        if lane is self.share_lane:
            return self._to_share(i, gradient)
        if gradient is None:
            return None
        # The check has other weights for the two halves, so that both g and the share are checked.
        second = self.kind == "signed" and not self.halves.in_first(self.micro, self.layout.rank)
        return Contribution((2.0 if second else 1.0) / self.layout.world, [gradient])

    def _to_share(self, i: int, gradient: Tensor | None) -> Contribution | None:
        parts = []
        if self.halves.sends_local_sum and self.fired_now[i] <= 1:
            earlier = self.layout.local_sum(i)
            parts += [] if earlier is None else [earlier]
        if gradient is not None and self.halves.adds_current(self.layout.rank):
            parts.append(gradient)
        return Contribution(1 / self.layout.world, parts) if parts else None

    def _take(self, i: int, gradient: Tensor) -> None:
        if not self.is_open:
            self._open()
        self.fired[i] += 1
        self.fired_now[i] += 1
        if self.norms is not None:
            # Reentrant checkpointing can deliver a gradient in parts, and squared norms of parts do not add up.
            self.broken |= self.fired_now[i] > 1
            self.norms[i] += squared_norm(gradient)
        self._put(i, gradient)

    def _put(self, i: int, gradient: Tensor | None) -> None:
        if self.companion is not None and self.companion.lanes:
            self.companion.put(i, [self._contribution(lane, i, gradient) for lane in self.companion.lanes])

    def end_micro_step(self) -> None:
        """Call it when the backward of a micro-step is over, before DeepSpeed reduces what it has accumulated."""
        if self.trace and not self.silent:
            self.traced, self.trace = self.trace, None
        self.silent = False
        if not self.in_window():
            return
        if not self.is_open:
            self._open()
        assert self.companion is not None
        for i, count in self.fired_now.items():
            if count != (1 if self.delivered else self.fires.setdefault(i, count)):
                self.uneven.add(i)
        if self.micro == 0:
            self.early = set(self.fired_now)
        elif self.layout.adds_to_stale:
            self.stale |= self.fired_now.keys() - self.early
        if self.halves.sends_local_sum and self.share_lane in self.companion.lanes:
            for i, count in enumerate(self.fired):
                if count and i not in self.fired_now:
                    self._put(i, None)
        self.companion.end_micro_step()
        self.micro += 1
        if self.micro - 1 != self.halves.copied_after or self.kind != "signed":
            self._begin_micro_step()

    def after_reduction(self) -> None:
        """Call it when DeepSpeed has reduced what it reduces after this micro-step: copy the first half's share."""
        if not self.is_open or self.kind != "signed" or self.micro - 1 != self.halves.copied_after:
            return
        if self.layout.engine.is_gradient_accumulation_boundary():
            return  # fewer micro-steps than agreed: `finish` says so
        self.layout.settle()
        sources = [self.layout.reduced_so_far(fragment) for fragment in self.layout.fragments]
        if sources:
            dtype = reduce(torch.promote_types, {source.dtype for source in sources})
            self.share = torch.empty(self.plan.numel, dtype=dtype, device=sources[0].device)
            targets = self.share.split([source.numel() for source in sources])
            torch._foreach_copy_(list(targets), sources)
            for fragment, target in zip(self.layout.fragments, targets):
                if not self.fired[fragment.param]:  # DeepSpeed may still hold the previous step's gradient
                    target.zero_()
        else:
            self.share = torch.zeros(0, dtype=self.dtype, device=self.device)
        self._begin_micro_step()  # which may go on with this share

    def finish(self, norm_squared: Tensor) -> Captured:
        """Before the optimizer step: one all-reduce of counts and norm; one more reduction if gradients came late."""
        n, companion = len(self.layout.params), self.companion
        late = set().union(*(lane.late for lane in companion.all_lanes)) if companion is not None else set()
        counts = torch.zeros(4, n, dtype=torch.float64)
        counts[0] = torch.tensor(self.fired)
        counts[1, list(late)] = 1
        counts[2, list(self.uneven)] = 1
        counts[3, list(self.stale)] = 1
        broken = self.broken or (companion is not None and companion.broken)
        flags = torch.tensor([self.micro != self.K, broken], dtype=torch.float64)
        if companion is not None:
            companion.finish()
        sent = torch.cat([counts.view(-1).to(self.device), flags.to(self.device), norm_squared.view(1)])
        counts, (incomplete, in_parts, square) = self._split(self.all_reduce(sent).cpu(), n)
        fired, late_anywhere, uneven, stale = (counts > 0).tolist()
        if companion is not None:
            companion.reduce_late([i for i in range(n) if late_anywhere[i]], self.bucket_size)
        reason = None
        if incomplete:
            reason = f"a rank ran {self.micro} backward passes instead of {self.K} (gradient_accumulation_steps)"
        elif in_parts:
            reason = "a gradient came in parts"
        elif any(uneven):
            i = uneven.index(True)
            reason = (
                f"parameter {self._name(i)} got another number of gradients in a micro-step than the "
                f"{self.fires.get(i, 1)} it got before"
            )
        elif any(stale):
            reason = (
                f"parameter {self._name(stale.index(True))} got no gradient in the first micro-step but later, and "
                "DeepSpeed adds it to that of the step before"
            )
        return Captured(fired, square**0.5, reason)

    @staticmethod
    def _split(message: Tensor, n: int) -> tuple[Tensor, list[float]]:
        return message[: 4 * n].view(4, n), message[4 * n :].tolist()

    def _name(self, i: int) -> str:
        parameter = self.layout.params[i]
        return next((name for name, p in self.layout.engine.module.named_parameters() if p is parameter), f"number {i}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self.layout.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def agree_on_order(self) -> None:
        """Plan the buckets in the order in which gradients came on rank 0, once all ranks have seen a backward whose
        gradients were not delivered at once."""
        if not self.learning:
            return
        n = len(self.layout.params)
        # For each parameter: when its last gradient came (those without one go to the end), and how many came.
        traced = self.traced or []
        order = torch.full((n,), len(traced), dtype=torch.int64)
        counts = torch.zeros(n + 1, dtype=torch.int64)
        counts[n] = int(not traced)
        for place, i in enumerate(traced):
            order[i] = place
            counts[i] += 1
        if self.layout.world > 1:
            counts = counts.to(self.device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group)
            counts = counts.cpu()
        if counts[n]:
            return  # a rank has seen none yet
        if self.layout.world > 1:
            order = order.to(self.device)
            dist.broadcast(order, group_src=0, group=self.group)
            order = order.cpu()
        self.learning = False
        self.fires = {i: int(count) for i, count in enumerate(counts[:n]) if count}
        self.order, self.replan = sorted(range(n), key=order.tolist().__getitem__), True

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for route in self.half_routes or []:
            if isinstance(route, FromSome) and route.sending and route.among is not None:
                dist.destroy_process_group(route.among)
        if self.group is not None:
            dist.destroy_process_group(self.group)
