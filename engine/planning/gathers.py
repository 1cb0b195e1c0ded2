"""What ZeRO-3 gathers in a micro-step: DeepSpeed 0.19.8's fetching, prefetching and releasing, without tensors.

Before a module runs, forward or backward, its own parameters are made whole; with the order of modules known from the
steps before, the next ones are fetched ahead; and after it has run they are let go, unless they are needed again
within `stage3_max_reuse_distance` elements. So a parameter travels once in a micro-step where the whole way from its
forward to its backward use is shorter than that, and twice where it is longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import nn

from engine.modeling.recompute import is_recomputed
from engine.planning.shards import Parameter
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings


def model_uses(model: nn.Module) -> list[Use]:
    """Each module once, in the order of definition, forward and then back; checkpointed blocks forward again.

    What really runs may differ (a head runs on every level, a branch is skipped): a recorded order is exact.
    """
    places = {id(p): i for i, p in enumerate(model.parameters())}
    trained = [p.requires_grad for p in model.parameters()]
    numbers = {module: k for k, module in enumerate(model.modules())}

    def visit(module: nn.Module, *, backward: bool) -> list[Use]:
        members = tuple(sorted(places[id(p)] for p in module.parameters(recurse=False)))
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        inner = [
            use for child in (reversed(children) if backward else children) for use in visit(child, backward=backward)
        ]
        uses = [Use(numbers[module], members, True), *inner, Use(numbers[module], members, False)]
        if backward and is_recomputed(module):
            uses = [*visit(module, backward=False), *uses]
        return uses

    # Backward ends before the first parameter that is trained: nothing in front of it needs a gradient.
    first = next((i for i, value in enumerate(trained) if value), len(trained))
    back = [use for use in visit(model, backward=True) if not use.members or max(use.members) >= first]
    return [*visit(model, backward=False), *back]


def gathered(
    parameters: Sequence[Parameter],
    settings: CommunicationSettings,
    persistent: set[int],
    uses: Sequence[Use] | None = None,
) -> list[tuple[int, ...]]:
    """The parameters of every all-gather of a micro-step, in order."""
    if uses is None:
        forward = [Use(i, (i,), fetch) for i in range(len(parameters)) for fetch in (True, False)]
        back = [Use(i, (i,), fetch) for i in reversed(range(len(parameters))) for fetch in (True, False)]
        uses = [*forward, *back]
    return _Coordinator(parameters, settings, persistent, uses).run()


class _Coordinator:
    """DeepSpeed's PartitionedParameterCoordinator with a complete trace."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        settings: CommunicationSettings,
        persistent: set[int],
        uses: Sequence[Use],
    ) -> None:
        self.numel = [p.numel for p in parameters]
        self.settings, self.persistent, self.uses = settings, persistent, uses
        self.fetches = [use for use in uses if use.fetch]
        self.whole = set(persistent)
        # The step at which each parameter is used next, from a step on, and elements passed until a step.
        self.occurrences: list[list[int]] = [[] for _ in parameters]
        self.passed = [0]
        for step, use in enumerate(self.fetches):
            for i in use.members:
                self.occurrences[i].append(step)
            self.passed.append(self.passed[-1] + sum(self.numel[i] for i in use.members))

    def run(self) -> list[tuple[int, ...]]:
        """One micro-step; it begins with everything cut up, for backward lets go of all at its end."""
        self.calls: list[tuple[int, ...]] = []
        self.in_flight: dict[int, tuple[int, ...]] = {}
        self.active: dict[int, set[int]] = {}
        self.available = self.step = 0
        self.fetched_for: dict[int, int] = {}
        self.queue = deque((i, step) for step, use in enumerate(self.fetches) for i in use.members)
        for use in self.uses:
            self._fetch(use) if use.fetch else self._release(use)
        return self.calls

    def _gather(self, members: Sequence[int]) -> None:
        missing = tuple(sorted(i for i in members if i not in self.whole and i not in self.in_flight))
        if missing:
            self.available += sum(self.numel[i] for i in missing)
            self.calls.append(missing)
            self.in_flight.update(dict.fromkeys(missing, missing))

    def _land(self, i: int) -> None:
        if i in self.in_flight:
            self.whole.update(self.in_flight.pop(i))

    def _let_go(self, i: int) -> None:
        if i in self.whole and not self.active.get(i):
            self.whole.discard(i)
            self.available -= self.numel[i]

    def _fetch(self, use: Use) -> None:
        self._gather(use.members)
        for i in use.members:
            self.active.setdefault(i, set()).add(use.module)
            self._land(i)
        wanted = {i for i in use.members if self.fetched_for.get(i, -1) < self.step}
        seen: set[int] = set()
        while self.queue and len(seen) < len(wanted):
            i, step = self.queue.popleft()
            self.fetched_for[i] = step
            seen.add(i)
        room = min(self.settings.max_live_parameters - self.available, self.settings.prefetch_bucket_size)
        ahead: dict[int, None] = {}
        numel = 0
        while self.settings.prefetch_bucket_size > 0 and self.queue and numel < room:
            i, step = self.queue.popleft()
            self.fetched_for[i] = max(self.fetched_for.get(i, -1), step)
            if i not in self.whole and i not in self.in_flight and i not in ahead:
                ahead[i] = None
                numel += self.numel[i]
        self._gather(list(ahead))
        self.step += 1

    def _release(self, use: Use) -> None:
        for i in use.members:
            self.active.get(i, set()).discard(use.module)
            if i in self.persistent or self.fetched_for.get(i, -1) > self.step or self._soon(i):
                continue
            self._let_go(i)

    def _soon(self, i: int) -> bool:
        """Whether a parameter is used again before the reuse distance is passed."""
        again = next((step for step in self.occurrences[i] if step >= self.step), None)
        return again is not None and self.passed[again] - self.passed[self.step] < self.settings.max_reuse_distance
