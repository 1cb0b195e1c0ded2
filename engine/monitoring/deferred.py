"""A number of the device that the host reads later, so that it need not wait for the device now."""

from __future__ import annotations

from typing import Any

import torch


class Deferred:
    """Copies the number to pinned memory while the device goes on. `read` waits only if the copy is not over yet."""

    def __init__(self, value: torch.Tensor | float | None) -> None:
        self._value, self._copied = value, None
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

            self._value = value.detach().to("cpu", non_blocking=True)  # into pinned memory
            copied: Any = get_accelerator().Event()
            copied.record()
            self._copied = copied

    def read(self) -> float | None:
        if self._copied is not None:
            self._copied.synchronize()
        return None if self._value is None else float(self._value)
