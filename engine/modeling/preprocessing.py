"""From the loader's lists to one batch on the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from engine.modeling.precision import Precision


class Preprocessor:
    """The detector's own data preprocessor, kept in fp32 outside the engine: a mean of 123.675 is 123.5 in bf16."""

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        self._preprocess = copy.deepcopy(model.data_preprocessor).to(device)
        self._dtype = precision.dtype

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[torch.Tensor, list[Any]]:
        data = self._preprocess(batch, training)
        return data["inputs"].to(self._dtype), data["data_samples"]
