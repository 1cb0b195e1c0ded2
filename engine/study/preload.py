"""Imported once by the process that trials are forked from."""

import atexit
import gc
import os

from engine.zero.processes import import_deepspeed, import_late_parts
from models.mmdet_setup import import_mmdet

import_mmdet()
import_deepspeed()

import_late_parts()

import engine.train.loop  # noqa: E402, F401

# What is imported is looked at by no garbage collection of the forked processes.
gc.collect()
gc.freeze()

# Libraries complain of leaks of their own when an interpreter that has loaded torch's compiler winds down.
atexit.register(os._exit, 0)
