"""mmdet's random image size of a batch (YOLOX), as a function of the step.

mmdet draws a size on rank 0 every few steps and keeps it on the object. So it depends on the number of ranks, and a
resumed run starts with another. Here the size follows from the seed and the step, both in mmengine's MessageHub.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from mmdet.models.data_preprocessors import BatchSyncRandomResize
from mmdet.registry import MODELS
from mmengine.logging import MessageHub


@MODELS.register_module()
class StepRandomResize(BatchSyncRandomResize):
    """In the first `interval` steps images keep their size, and later each `interval` has a size of its own."""

    def forward(self, inputs: torch.Tensor, data_samples: list[Any]) -> tuple[torch.Tensor, list[Any]]:
        height, width = inputs.shape[-2:]
        hub = MessageHub.get_current_instance()
        period = hub.get_info("iter") // self._interval
        self._input_size = (height, width)
        if period:
            cells = random.Random(f"{hub.get_info('seed')} {period}").randint(*self._random_size_range)
            self._input_size = self._size_divisor * cells, self._size_divisor * int(width / height * cells)
        return super().forward(inputs, data_samples)

    def _get_random_size(self, aspect_ratio: float, device: torch.device) -> tuple[int, int]:
        return self._input_size  # nothing is drawn for the next step
