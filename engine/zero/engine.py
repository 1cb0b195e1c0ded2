"""Build DeepSpeed's engine for a model and an optimizer, in a run and in a dry run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError, first_line
from engine.zero.layout import Layout, layout_of
from engine.zero.linear import guard_linear
from engine.zero.module_trace import parameters_only
from engine.zero.processes import import_deepspeed


def initialise_engine(model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
    """`deepspeed.initialize`. It refuses some combinations of settings only here, once the model is known."""
    deepspeed = import_deepspeed()
    try:
        with parameters_only():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(settings))
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"DeepSpeed does not accept this config ({first_line(error)})") from error
    guard_linear()
    return engine


def read_layout(engine: Any) -> Layout:
    try:
        return layout_of(engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
