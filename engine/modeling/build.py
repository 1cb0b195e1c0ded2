"""The model of a run, ready for DeepSpeed: built, initialised, and converted as the config asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from torch import nn

from engine.config import RunConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line
from engine.modeling.kernels import compile_backbone, use_channels_last
from engine.modeling.precision import Precision, loss_in_fp32
from engine.modeling.recompute import checkpoint_blocks
from engine.randomness import BUILD, seed_all
from engine.zero.partitioned_build import initialise, partitioned
from engine.zero.scalars import give_dimensions
from models.batch_norm import convert_batch_norm, has_sync_bn


class ModelBuilder(Protocol):
    """The part of `engine.tasks.base.Task` that is needed here; a room below does not import it."""

    config: RunConfig

    def build_model(self, classes: Classes) -> nn.Module: ...

    def build_preprocessor(self, classes: Classes) -> nn.Module: ...


def build_model(
    task: ModelBuilder, classes: Classes, *, empty: bool = False, load: Callable[[nn.Module], None] | None = None
) -> nn.Module:
    """The model of a task's config, initialised from the run's seed.

    `empty` leaves the weights to the caller. `load` is called on the initialised model and may replace them.
    """
    config = task.config
    detector, precision = config.detector, Precision.of(config.deepspeed)
    seed_all(config.run.seed, BUILD)
    with partitioned(dict(config.deepspeed)) if detector.zero_init else contextlib.nullcontext():
        model = task.build_model(classes)
    model.data_preprocessor = task.build_preprocessor(classes)  # outside zero.Init, which would round its means
    seed_all(config.run.seed, BUILD, 1)  # again, because zero.Init draws random numbers while building
    if not empty:
        try:
            initialise(model)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f'detector "{detector.config}" cannot be initialised with these options ({reason})'
            ) from error
    if load is not None:
        load(model)
    give_dimensions(model)
    if detector.sync_bn or precision.half or has_sync_bn(model):  # torch's SyncBatchNorm refuses CPU tensors
        try:
            convert_batch_norm(model, synchronise=detector.sync_bn)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if precision.half:
        loss_in_fp32(model)
    if detector.checkpoint_activations:
        checkpoint_blocks(model, detector.checkpoint_activations)
    if detector.channels_last:
        use_channels_last(model)
    if detector.compile_backbone and not empty:  # an empty model is planned or evaluated, and not worth the minutes
        compile_backbone(model, stage=config.zero_stage, recomputed=bool(detector.checkpoint_activations))
    model.train()  # mmdet's distilled detectors return nothing here
    return model
