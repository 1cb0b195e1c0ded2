"""What one micro-batch does: preprocess, compute the losses, agree with the other ranks on what goes backward.

DeepSpeed calls the detector itself, whose `forward` on this instance becomes a `TrainingForward`: parameter names
stay mmdet's, and everything between the batch and the loss happens inside the engine's forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from engine.zero.complete_gradients import CompleteGradients


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
