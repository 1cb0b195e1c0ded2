"""Random numbers that belong to a sample or a micro-batch, not to the process that computes it."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch

# What the numbers are for, so that streams with equal counters never meet.
SAMPLE, FORWARD, ORDER, BUILD = range(4)


def seed_all(*numbers: int) -> None:
    """Seed Python, numpy and torch (all devices) from whole numbers, mixed so that neighbours are unrelated."""
    words = np.random.SeedSequence(numbers).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    if _has_devices():
        torch.manual_seed(int(words[2]))
    else:  # torch.manual_seed would note a traceback for a device that may appear: 0.2 ms and more, for every sample
        torch.default_generator.manual_seed(int(words[2]))


@functools.cache
def _has_devices() -> bool:
    return torch.accelerator.is_available()
