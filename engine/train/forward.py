"""The forward pass of one micro-batch: preprocess, compute the losses, and agree with the other ranks on the gradients.

DeepSpeed wraps the detector itself. A `TrainingForward` replaces the detector's `forward`, so that parameters keep
mmdet's names and everything between the batch and the loss happens inside the engine's forward pass.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError, first_line
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from engine.zero.complete_gradients import CompleteGradients
from models.normaliser import normalised


@dataclass
class MicroBatchRecord:
    """What the loop needs to know about the last micro-batch."""

    losses: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    broken_ranks: int = 0
    alarms: int = 0


class TrainingForward:
    """`model.forward` while training: takes a batch and returns the scalar loss. `record` describes the last batch."""

    def __init__(
        self, model: Any, preprocess: Preprocessor, precision: Precision, device: torch.device, *, over_ranks: bool
    ) -> None:
        self.model, self.preprocess, self.precision, self.device = model, preprocess, precision, device
        self.over_ranks = over_ranks  # whether heads average their normalisers
        self.gradients = CompleteGradients(model)
        self.record = MicroBatchRecord()
        self.passed = False  # whether a first batch has passed

    @contextlib.contextmanager
    def _first_pass_explained(self) -> Iterator[None]:
        """Parts of a model or of the augmentation that do not fit each other fail in the first pass, on all ranks."""
        if self.passed:
            yield
            return
        try:
            yield
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._explained(error) from error
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise
            raise self._explained(error) from error
        self.passed = True

    def _explained(self, error: Exception) -> ConfigError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return ConfigError(
            f"the model cannot compute a loss for the first batch ({type(error).__name__}: {first_line(error)}, in "
            f"{Path(frame.filename).name} line {frame.lineno}): check that detector.options and data.augmentation fit "
            "each other"
        )

    def __call__(self, batch: dict[str, Any], *, alarm: bool = False) -> torch.Tensor:
        touched = self.gradients.touch()
        with self._first_pass_explained():
            images, samples = self.preprocess(batch, training=True)
            with self.precision.autocast(self.device), normalised(over_ranks=self.over_ranks):
                loss, parts = self.model.parse_losses(self.model.loss(images, samples))
        values = torch.stack([torch.as_tensor(v, device=loss.device).detach().float().mean() for v in parts.values()])
        losses = dict(zip(parts, values.tolist()))
        finite = bool(torch.isfinite(loss))
        agreed = self.gradients.complete(loss.float(), touched, counts=finite, alarm=alarm)
        self.record = MicroBatchRecord(losses, finite, agreed.broken, agreed.alarms)
        return agreed.loss
