"""Keep modules without parameters out of ZeRO-3's trace.

ZeRO-3 records the order in which modules run, prefetches by it, and assumes that all ranks have the same order. But a
detector's loss modules and RoI layers may run on one rank and not on another, depending on the objects in its images.
Then one rank drops its trace, fetches at other moments than the others, and all wait for ever (DeepSpeed 0.19.8,
two-stage detectors). A module without parameters has nothing to fetch, so it needs no hooks.
The other two ways to such a hang: `complete_gradients.py` and `whole_parameters.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def parameters_only() -> Iterator[None]:
    """Use it around `deepspeed.initialize`."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    register = DeepSpeedZeRoOffload._register_deepspeed_module

    def register_owners(self: Any, module: nn.Module, count: list[int] | None = None) -> None:
        if next(module.parameters(), None) is not None:
            register(self, module, count=[0] if count is None else count)

    DeepSpeedZeRoOffload._register_deepspeed_module = register_owners
    try:
        yield
    finally:
        DeepSpeedZeRoOffload._register_deepspeed_module = register
