"""Build DeepSpeed's engine for a model and an optimizer, in a run and in a dry run."""

from __future__ import annotations

import traceback
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
    except (AssertionError, ValueError, TypeError, KeyError, NotImplementedError, ImportError, OSError) as error:
        raise ConfigError(
            f"DeepSpeed does not accept this config ({type(error).__name__}: {first_line(error)})"
        ) from error
    except Exception as error:
        if _in_monitor(error):  # such as wandb without a login
            raise ConfigError(
                f"a monitor of DeepSpeed (tensorboard, wandb, comet) failed ({first_line(error)})"
            ) from error
        raise
    guard_linear()
    return engine


def _in_monitor(error: BaseException) -> bool:
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any("deepspeed/monitor/" in name for name in frames)


def read_layout(engine: Any) -> Layout:
    try:
        return layout_of(engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
