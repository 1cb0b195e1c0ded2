"""Random numbers that belong to a sample or a micro-batch, not to the process that computes it."""

from __future__ import annotations

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
    torch.manual_seed(int(words[2]))
