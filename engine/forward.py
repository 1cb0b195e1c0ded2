"""What one micro-batch does: preprocess, compute the losses, agree with the other ranks on what goes backward.

DeepSpeed calls the detector itself, whose `forward` on this instance becomes a `TrainingForward`: parameter names
stay mmdet's, and everything between the batch and the loss happens inside the engine's forward pass.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any, ContextManager

import torch
from torch import nn

from engine.zero.complete_gradients import CompleteGradients


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The type that DeepSpeed casts the model to; fp32 where it casts nothing."""

    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, deepspeed_config: dict[str, Any]) -> Precision:
        if deepspeed_config.get("bf16", deepspeed_config.get("bfloat16", {})).get("enabled"):
            return cls(dtype=torch.bfloat16)
        if deepspeed_config.get("fp16", {}).get("enabled"):
            return cls(dtype=torch.float16)
        return cls()

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    def autocast(self, device: torch.device) -> ContextManager:
        """Softmax, losses and norms in fp32 although the weights are of half precision."""
        return torch.autocast(device.type, dtype=self.dtype) if self.half else contextlib.nullcontext()


class Preprocessor:
    """The detector's own data preprocessor, kept in fp32 outside the engine: a mean of 123.675 is 123.5 in bf16."""

    def __init__(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        self._preprocess = copy.deepcopy(model.data_preprocessor).to(device)
        self._dtype = precision.dtype

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[torch.Tensor, list[Any]]:
        data = self._preprocess(batch, training)
        return data["inputs"].to(self._dtype), data["data_samples"]


@dataclass
class MicroBatchRecord:
    """What the loop wants to know of the micro-batch that just went forward."""

    losses: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    broken_ranks: int = 0
    alarms: int = 0


class TrainingForward:
    """`model.forward` while training: a batch in, the scalar loss out; `record` tells about the last one."""

    def __init__(self, model: nn.Module, preprocess: Preprocessor, precision: Precision, device: torch.device) -> None:
        self.model, self.preprocess, self.precision, self.device = model, preprocess, precision, device
        self.gradients = CompleteGradients(model)
        self.record = MicroBatchRecord()

    def __call__(self, batch: dict[str, Any], *, alarm: bool = False) -> torch.Tensor:
        touched = self.gradients.touch()
        images, samples = self.preprocess(batch, training=True)
        with self.precision.autocast(self.device):
            loss, parts = self.model.parse_losses(self.model.loss(images, samples))
        values = torch.stack([torch.as_tensor(v, device=loss.device).detach().float().mean() for v in parts.values()])
        losses = dict(zip(parts, values.tolist()))
        finite = bool(torch.isfinite(loss))
        agreed = self.gradients.complete(loss.float(), touched, counts=finite, alarm=alarm)
        self.record = MicroBatchRecord(losses, finite, agreed.broken, agreed.alarms)
        return agreed.loss
