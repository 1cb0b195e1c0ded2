"""Connect an optimizer to DeepSpeed's engine, as set in the JSON's optimizer block."""

from __future__ import annotations

from typing import Any

import torch

from engine.config.schema import OptimizerConfig
from engine.errors import ConfigError
from engine.optim.agvm import AGVMOptimizer
from engine.optim.rule import Rule
from engine.optim.sam import SharpnessAware
from engine.zero.layout import Layout


def attach(
    config: OptimizerConfig, engine: Any, optimizer: torch.optim.Optimizer, layout: Layout
) -> SharpnessAware | None:
    """Attach the optimizer if it is one of ours. Returns the SAM step if the config asks for SAM."""
    size = config.params.get("bucket_size")
    try:
        if isinstance(optimizer, AGVMOptimizer) and size is not None:
            optimizer.attach(engine, bucket_size=size)
        elif isinstance(optimizer, Rule):
            optimizer.attach(engine)
        return None if config.sam is None else SharpnessAware(engine, optimizer, layout, config.sam.rho)
    except ValueError as error:
        raise ConfigError(str(error)) from None
