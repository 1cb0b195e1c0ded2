"""Imported once by the process that trials are forked from."""

import atexit
import gc
import os

from engine.distributed import import_deepspeed
from engine.mmdet_setup import import_mmdet

import_mmdet()
import_deepspeed()

# DeepSpeed asks for this one, and with it for torch's compiler, only when an optimizer is wrapped.
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401

import engine.training  # noqa: E402, F401

# What is imported is looked at by no garbage collection of the forked processes.
gc.collect()
gc.freeze()

# Libraries complain of leaks of their own when an interpreter that has loaded torch's compiler winds down.
atexit.register(os._exit, 0)
