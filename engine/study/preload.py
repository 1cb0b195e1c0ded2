"""Imported once by the process that trials are forked from."""

import gc

from engine.distributed import import_deepspeed
from engine.mmdet_setup import import_mmdet

import_mmdet()
import_deepspeed()

import engine.training  # noqa: E402, F401

# What is imported is looked at by no garbage collection of the forked processes.
gc.collect()
gc.freeze()
