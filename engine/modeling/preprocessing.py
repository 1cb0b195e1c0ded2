"""Turn the loader's lists into one batch on the device."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn

from engine.modeling.precision import Precision


class Preprocess(Protocol):
    """Turns a batch of the loader into the inputs of `model.predict` or `model.loss`."""

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[Any, Any]: ...


class Preprocessor:
    """The detector's data preprocessor, kept in fp32 outside DeepSpeed's engine: in bf16 a mean of 123.675 is 123.5."""

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        self._preprocess: Any = copy.deepcopy(model.data_preprocessor).to(device)
        self._dtype = precision.dtype

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[torch.Tensor, list[Any]]:
        data = self._preprocess(batch, training)
        return data["inputs"].to(self._dtype), data["data_samples"]
