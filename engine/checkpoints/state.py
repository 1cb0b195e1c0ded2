"""What a checkpoint saves and restores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.config import BatchPlan
from engine.optim.ema import ShardEMA
from engine.zero.layout import Layout


@dataclass(kw_only=True)
class TrainingState:
    """The parts of a run that a checkpoint needs: DeepSpeed's engine, the optimizer, the shards and their average."""

    engine: Any
    optimizer: torch.optim.Optimizer
    layout: Layout
    batch: BatchPlan
    stage: int
    precision: torch.dtype
    ema: ShardEMA | None
    meta: dict[str, Any]  # stored beside the tensors: the config, and the classes of the data
