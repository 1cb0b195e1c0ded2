"""Learning-rate schedules as pure functions of the optimizer step, so that a checkpoint need not store them.

`factor(t)` multiplies every group's base learning rate at optimizer step t = 0, 1, ..., steps - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config.schema import ScheduleConfig
from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    steps: int
    steps_per_epoch: int
    warmup_steps: int
    milestones: tuple[int, ...]
    config: ScheduleConfig

    def factor(self, step: int) -> float:
        return self._warmup(step) * self._decay(step)

    def _warmup(self, step: int) -> float:
        if step >= self.warmup_steps:
            return 1.0
        start, share = self.config.warmup_start, step / self.warmup_steps
        if self.config.warmup == "exponential":
            return start ** (1 - share)
        return start + (1 - start) * share

    def _decay(self, step: int) -> float:
        config = self.config
        if config.decay == "multistep":
            return config.gamma ** sum(step >= milestone for milestone in self.milestones)
        if config.decay == "constant":
            return 1.0
        share = min(
            step / self.steps, 1.0
        )  # of the whole run with warm-up, as in the paper's poly: 1 - iter / max_iter
        curve = (1 - share) ** config.power if config.decay == "poly" else (1 + math.cos(math.pi * share)) / 2
        return config.min_factor + (1 - config.min_factor) * curve


def build_schedule(config: ScheduleConfig, steps_per_epoch: int) -> Schedule:
    steps = config.steps or max(1, round((config.epochs or 0) * steps_per_epoch))  # the config has one of the two
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
    else:
        warmup = round((config.warmup_epochs or 0) * steps_per_epoch)
    if warmup > steps:
        raise ConfigError(f"the warm-up of {warmup} steps is longer than the run of {steps} steps: shorten it")
    # A milestone below 1 is a share of the run, so that it fits every length; from 1 on it is an epoch, as in mmdet.
    milestones = tuple(sorted(round(m * steps) if m < 1 else round(m * steps_per_epoch) for m in config.milestones))
    return Schedule(
        steps=steps, steps_per_epoch=steps_per_epoch, warmup_steps=warmup, milestones=milestones, config=config
    )
