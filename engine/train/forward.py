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
from typing import Any, NamedTuple

import torch

from engine import distributed
from engine.errors import ConfigError, first_line
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from engine.zero.complete_gradients import CompleteGradients
from models.normaliser import normalised


class Notices(NamedTuple):
    """What a rank tells the others in the message of every micro-step, and what any of them said."""

    unreadable: bool = False  # the next batch cannot be loaded
    stop: bool = False  # a signal was received
    unwritten: bool = False  # a record could not be written
    unnamed: bool = False  # there is a loss that the ranks have not agreed on yet


@dataclass
class MicroBatchRecord:
    """What the loop needs to know about the last micro-batch."""

    losses: dict[str, float] = field(default_factory=dict)  # means over ranks
    own: dict[str, torch.Tensor] = field(default_factory=dict)  # of this rank, still on the device
    finite: bool = True
    broken_ranks: int = 0
    told: Notices = Notices()


class TrainingForward:
    """`model.forward` while training: takes a batch and returns the scalar loss. `record` describes the last batch.

    Set `notices` before the call to tell the other ranks something.
    """

    def __init__(
        self, model: Any, preprocess: Preprocessor, precision: Precision, device: torch.device, *, over_ranks: bool
    ) -> None:
        self.model, self.preprocess, self.precision, self.device = model, preprocess, precision, device
        self.over_ranks = over_ranks  # whether heads average their normalisers
        self.gradients = CompleteGradients(model)
        self.notices = Notices()
        self.record = MicroBatchRecord()
        self.loss_names: list[str] | None = None  # the same on all ranks
        self.passed = False  # whether a first batch has passed
        self._sent: tuple[Notices, torch.Tensor] | None = None

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

    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        touched = self.gradients.touch()
        with self._first_pass_explained():
            images, samples = self.preprocess(batch, training=True)
            with self.precision.autocast(self.device), normalised(over_ranks=self.over_ranks):
                loss, parts = self.model.parse_losses(self.model.loss(images, samples))
        own = {name: torch.as_tensor(v, device=loss.device).detach().float().mean() for name, v in parts.items()}
        if self.loss_names is None:
            self._agree_on_names(own)
        names = self.loss_names or []
        unnamed = not own.keys() <= set(names)
        values = [own[name] if name in own else loss.new_zeros((), dtype=torch.float32) for name in names]
        extra = torch.cat([self._on_device(self.notices._replace(unnamed=unnamed), loss.device), torch.stack(values)])
        agreed = self.gradients.complete(loss.float(), touched, counts=torch.isfinite(loss), extra=extra)
        told = Notices(*(count > 0 for count in agreed.extra[: len(Notices._fields)]))
        means = [value / distributed.world_size() for value in agreed.extra[len(Notices._fields) :]]
        self.record = MicroBatchRecord(dict(zip(names, means)), own, agreed.counts, agreed.broken, told)
        if told.unnamed:
            self._agree_on_names(own)
        return agreed.loss

    def _agree_on_names(self, own: dict[str, torch.Tensor]) -> None:
        """On all ranks: they sum losses as vectors, which must have the same places. Some heads have a loss only where
        there are objects, so that a name may come later; its first value is then not on record."""
        known = {*(self.loss_names or ()), *own}
        self.loss_names = sorted({name for names in distributed.all_gather_objects(sorted(known)) for name in names})

    def _on_device(self, notices: Notices, device: torch.device) -> torch.Tensor:
        if self._sent is None or self._sent[0] != notices:  # there is rarely news, so that little is copied
            self._sent = notices, torch.tensor(notices, dtype=torch.float32).to(device)
        return self._sent[1]
