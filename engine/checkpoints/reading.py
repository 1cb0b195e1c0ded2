"""The model in a checkpoint folder, whole and by name, whatever the ranks and stage that saved it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.finding import Checkpoint, find_checkpoint
from engine.checkpoints.zero_folder import EMA
from engine.weights import Stored
from engine.zero.stored import WEIGHTS


def read_checkpoint(path: str | Path, *, ema: bool = False) -> tuple[dict[str, Stored | Tensor], dict[str, Any]]:
    """The state dict, its trained part read tensor by tensor as it is asked for, and the run's `meta`."""
    checkpoint = find_checkpoint(path, say=print)
    return state_dict(checkpoint, ema=ema), {**checkpoint.meta, "ema": ema}


def state_dict(checkpoint: Checkpoint, *, ema: bool = False) -> dict[str, Stored | Tensor]:
    """Master weights, or their average; of frozen parameters and buffers there is only one value."""
    if ema and EMA not in checkpoint.states:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} holds no averaged weights: train with run.ema to have them"
        )
    state = EMA if ema else WEIGHTS
    tensors: dict[str, Stored | Tensor] = {
        name: Stored(
            shape, lambda name=name, shape=shape: checkpoint.read(name, state, 0, math.prod(shape)).view(shape)
        )
        for name, shape in checkpoint.parameters.items()
    }
    tensors.update(checkpoint.untrained())
    tensors.update({alias: tensors[name] for alias, name in checkpoint.aliases.items()})  # of frozen ones too
    return tensors
