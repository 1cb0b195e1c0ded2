"""All parts of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.state import TrainingState
from engine.config import BatchPlan, RunConfig
from engine.data.order import GlobalBatches
from engine.data.types import Classes, Split
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from engine.optim.ema import ShardEMA
from engine.optim.sam import SharpnessAware
from engine.optim.schedule import Schedule
from engine.tasks.base import Task
from engine.train.forward import TrainingForward
from engine.zero.layout import Layout

GOES_ON = "training goes on (run.on_save_error)"  # after the reason why a file could not be written


@dataclass(kw_only=True)
class Run:
    """Built by `engine.train.build.build_run`."""

    config: RunConfig
    task: Task
    plan: BatchPlan
    classes: Classes
    train: Split
    val: Split
    schedule: Schedule
    batches: GlobalBatches
    engine: Any  # DeepSpeed's
    optimizer: torch.optim.Optimizer
    forward: TrainingForward
    preprocess: Preprocessor
    precision: Precision
    work_dir: Path
    layout: Layout  # where master weights and optimizer state are on this rank
    ema: ShardEMA | None = None
    sam: SharpnessAware | None = None
    start: int = 0  # optimizer steps done before this process began
    lost_record: str | None = None  # on rank 0: why a record could not be written
    lost_save: str | None = None  # why the newest checkpoint could not be written

    @property
    def stage(self) -> int:
        return self.config.zero_stage

    def state(self) -> TrainingState:
        """The part that a checkpoint saves and restores."""
        return TrainingState(
            engine=self.engine,
            optimizer=self.optimizer,
            layout=self.layout,
            batch=self.plan,
            stage=self.stage,
            precision=self.precision.dtype,
            ema=self.ema,
            meta={"config": self.config.to_json(), "dataset_meta": self.classes.to_meta()},
        )
