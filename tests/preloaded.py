"""Imported once by the process that ranks and scripts of the tests are forked from: imports take ten seconds."""

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

torch.set_num_threads(1)

from engine.zero.processes import import_deepspeed, import_late_parts  # noqa: E402
from models.mmdet_setup import import_mmdet  # noqa: E402

import_mmdet()
import_deepspeed()
import_late_parts()

import hypothesis  # noqa: E402, F401
import matplotlib.figure  # noqa: E402, F401
import pytest  # noqa: E402, F401

import engine.inference.evaluate  # noqa: E402
import engine.inference.export  # noqa: E402
import engine.inference.infer  # noqa: E402
import engine.tasks.classification  # noqa: E402
import engine.tasks.detection  # noqa: E402
import engine.tasks.panoptic  # noqa: E402
import engine.tasks.semantic  # noqa: E402
import engine.train.loop  # noqa: E402, F401

# What is imported is looked at by no garbage collection of the forked processes: mmengine collects at every turn.
gc.collect()
gc.freeze()
