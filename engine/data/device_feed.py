"""Batches on the device before they are needed: the next one is copied while the device computes with this one.

Loader processes decode, resize and augment; images leave them as bytes, in pinned memory if there is an accelerator.
The model's preprocessor normalises them on the device. On a CPU nothing is copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch


class DeviceFeed:
    """Hands out batches one by one, and has the next one already. `waited`: seconds that the caller spent waiting."""

    def __init__(self, batches: Iterable[Any], device: torch.device) -> None:
        self._batches, self._device = iter(batches), device
        self._stream: Any = None
        if device.type != "cpu":
            from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

            self._accelerator = get_accelerator()
            self._stream = self._accelerator.Stream()
        self.waited = 0.0
        self._fetch()

    @property
    def next(self) -> Any:
        """The batch that `take` returns next; None at the end."""
        return self._next

    def take(self) -> Any:
        batch = self._next
        if self._stream is not None:
            current = self._accelerator.current_stream()
            current.wait_stream(self._stream)
            for tensor in _images(batch):
                tensor.record_stream(current)  # its memory is not reused before this stream has used it
        self._fetch()
        return batch

    def _fetch(self) -> None:
        began = time.monotonic()
        self._next = next(self._batches, None)
        self.waited += time.monotonic() - began
        if self._stream is not None:
            with self._accelerator.stream(self._stream):
                self._next = _moved(self._next, self._device)

    def waited_since(self) -> float:
        """Seconds of waiting since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited


def _images(batch: Any) -> list[torch.Tensor]:
    inputs = batch.get("inputs", []) if isinstance(batch, dict) else []
    return [image for image in inputs if isinstance(image, torch.Tensor)]


def _moved(batch: Any, device: torch.device) -> Any:
    """The same batch with its images on the device; boxes and labels are small and follow in the preprocessor."""
    if not _images(batch):
        return batch  # the end, or one that could not be loaded
    return {**batch, "inputs": [image.to(device, non_blocking=True) for image in batch["inputs"]]}
