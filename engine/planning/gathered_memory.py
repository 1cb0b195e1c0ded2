"""How much of a model ZeRO-3 has whole at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.planning.gathers import _Coordinator
from engine.planning.shards import Parameter
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings


class Gathered(NamedTuple):
    """Elements, in forward and in backward."""

    forward: int
    backward: int


class _Weighed(_Coordinator):
    forward = backward = 0
    is_forward = True

    def _fetch(self, use: Use) -> None:
        super()._fetch(use)
        whole = sum(self.numel[i] for i in self.whole - self.persistent)
        now = whole + sum(self.numel[i] for call in set(self.in_flight.values()) for i in call)
        if self.is_forward:
            self.forward = max(self.forward, now)
        else:
            self.backward = max(self.backward, now)

    def _release(self, use: Use) -> None:
        super()._release(use)
        self.is_forward &= use.module != self.uses[0].module  # the whole model has run


def most_gathered(
    parameters: Sequence[Parameter], settings: CommunicationSettings, persistent: set[int], uses: Sequence[Use]
) -> Gathered:
    """The most elements of gathered parameters that are there at a time, those that are always whole left out.

    A parameter is copied out of the buffer that came, and that buffer stays as long as one of its parameters has not
    been asked for: fetched far ahead, weights are there twice.
    """
    coordinator = _Weighed(parameters, settings, persistent, uses)
    coordinator.run()
    return Gathered(coordinator.forward, coordinator.backward)
