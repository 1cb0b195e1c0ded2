"""What ZeRO-3 gathers in a micro-step: DeepSpeed 0.19.8's fetching, prefetching and releasing, without tensors.

Before a module runs, forward or backward, its own parameters are gathered; with the order of modules known from earlier
steps, the next ones are fetched ahead; and after it has run they are released, unless they are needed again within
`stage3_max_reuse_distance` elements. So a parameter is sent once in a micro-step where the distance from its forward to
its backward use is shorter than that, and twice where it is longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.planning.model_facts import ModelFacts
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings


class Gathers:
    """DeepSpeed's PartitionedParameterCoordinator with a complete trace, for one micro-step.

    `calls` are the parameters of every all-gather, in order. `persistent` ones are small and stay whole on every rank.
    `forward` and `backward` are the most elements of gathered parameters in memory at a time, without persistent ones.
    A parameter is copied out of the buffer that was received, and that buffer stays until all of its parameters have
    been asked for: fetched far ahead, weights are in memory twice.
    """

    def __init__(self, model: ModelFacts, settings: CommunicationSettings) -> None:
        self.numel = [p.numel for p in model.parameters]
        self.settings = settings
        self.persistent, room = set[int](), settings.model_persistence_threshold
        for i, numel in enumerate(self.numel):
            if numel <= min(room, settings.persistence_threshold):
                self.persistent.add(i)
                room -= numel
        fetches = [use for use in model.uses if use.fetch]
        # The steps at which each parameter is used, and the elements passed until a step.
        self.occurrences: list[list[int]] = [[] for _ in self.numel]
        self.passed = [0]
        for step, use in enumerate(fetches):
            for i in use.members:
                self.occurrences[i].append(step)
            self.passed.append(self.passed[-1] + self._elements(use.members))
        # Nothing but persistent parameters is whole at the start, because backward ends with releasing all.
        self.whole = set(self.persistent)
        self.calls: list[tuple[int, ...]] = []
        self.in_flight: dict[int, tuple[int, ...]] = {}
        self.active: dict[int, set[int]] = {}
        self.available = self.step = self.held = 0
        self.fetched_for: dict[int, int] = {}
        self.queue = deque((i, step) for step, use in enumerate(fetches) for i in use.members)
        most, phase = [0, 0], 0
        for use in model.uses:
            if use.fetch:
                self._fetch(use)
                most[phase] = max(most[phase], self.held)
            else:
                self._release(use)
                phase = phase or int(use.module == model.uses[0].module)  # once the whole model has run
        self.forward, self.backward = most

    def _elements(self, members: Iterable[int]) -> int:
        return sum(self.numel[i] for i in members)

    def _gather(self, members: Sequence[int]) -> None:
        missing = tuple(sorted(i for i in members if i not in self.whole and i not in self.in_flight))
        if missing:
            self.available += self._elements(missing)
            self.held += self._elements(missing)
            self.calls.append(missing)
            self.in_flight.update(dict.fromkeys(missing, missing))

    def _land(self, i: int) -> None:
        if i in self.in_flight:
            call = self.in_flight.pop(i)
            self.held += self._elements([j for j in call if j not in self.whole])
            self.whole.update(call)
            if call not in self.in_flight.values():
                self.held -= self._elements(call)

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
            if i in self.whole and not self.active.get(i):
                self.whole.discard(i)
                self.available -= self.numel[i]
                self.held -= self.numel[i]

    def _soon(self, i: int) -> bool:
        """Whether a parameter is used again within the reuse distance."""
        again = next((step for step in self.occurrences[i] if step >= self.step), None)
        return again is not None and self.passed[again] - self.passed[self.step] < self.settings.max_reuse_distance
