"""Random numbers that depend on the sample or micro-batch, not on the process that computes it."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch

# Purposes of random numbers. They are part of the seed, so streams with equal counters differ.
SAMPLE, FORWARD, ORDER, BUILD = range(4)


def seed_all(*numbers: int) -> None:
    """Seed Python, numpy and torch (all devices) from whole numbers; similar numbers give unrelated seeds."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    if _has_devices():
        torch.manual_seed(int(words[2]))
    else:  # torch.manual_seed records a traceback for a device that may appear later: 0.2 ms or more per sample
        torch.default_generator.manual_seed(int(words[2]))


@functools.cache
def _has_devices() -> bool:
    return torch.accelerator.is_available()
