"""Read weights by name from a weight file, or from a checkpoint folder saved on any number of ranks at any stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.finding import Checkpoint, find_checkpoint
from engine.checkpoints.zero_folder import EMA
from engine.errors import CheckpointError, short
from engine.modeling.weights import LoadReport, Stored, WeightsError, fit_weights, read_file
from engine.zero.stored import WEIGHTS


def read_weights(path: str | Path, *, ema: bool = False) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The state dict of a file or a checkpoint folder, and its `meta` if it is one of ours: step, classes, config."""
    # Rank 0 decides: all ranks read a folder together. `latest` and `best` are files that name a folder.
    is_folder = Path(path).expanduser().is_dir() or Path(path).name in (store.LATEST, store.BEST)
    if distributed.broadcast_object(is_folder):
        return read_checkpoint(path, ema=ema)
    tensors, meta = read_file(path)
    if ema and not meta.get("ema"):
        raise WeightsError(
            f"weight file {path} does not hold averaged weights: export them with --ema from a checkpoint"
        )
    return tensors, meta


def load_weights(model: nn.Module, path: str | Path, *, drop_mismatched: bool) -> LoadReport:
    """Copy what fits by name and shape into the model, which may be partitioned, and report the rest."""
    return fit_weights(model, read_weights(path)[0], str(path), drop_mismatched=drop_mismatched)


def read_checkpoint(path: str | Path, *, ema: bool = False) -> tuple[dict[str, Stored | Tensor], dict[str, Any]]:
    """The state dict and the run's `meta`. Trained parameters are read from disk one by one, when they are used."""
    checkpoint = find_checkpoint(path, say=print)
    return state_dict(checkpoint, ema=ema), {**checkpoint.meta, "ema": ema}


def state_dict(checkpoint: Checkpoint, *, ema: bool = False) -> dict[str, Stored | Tensor]:
    """Master weights or, with `ema`, their average. Frozen parameters and buffers have no average."""
    if ema and EMA not in checkpoint.states:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} holds no averaged weights: train with run.ema to have them"
        )
    state = EMA if ema else WEIGHTS
    checkpoint.check_shapes()

    def stored(name: str, shape: tuple[int, ...]) -> Stored:
        return Stored(shape, lambda: checkpoint.read(name, state, 0, math.prod(shape)).view(shape))

    tensors: dict[str, Stored | Tensor] = {name: stored(name, shape) for name, shape in checkpoint.parameters.items()}
    tensors.update(checkpoint.untrained())
    for alias, name in checkpoint.aliases.items():  # frozen ones have aliases too
        if name not in tensors:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder} has no {short(name)}, another name of {short(alias)}"
            )
        tensors[alias] = tensors[name]
    return tensors
