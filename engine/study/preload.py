"""Imported once, by the process from which trials are forked."""

import atexit
import gc
import os

from engine.zero.processes import import_deepspeed, import_late_parts
from models.mmdet_setup import import_mmdet

import_mmdet()
import_deepspeed()

import_late_parts()

import engine.train.loop  # noqa: E402, F401

# The forked processes' garbage collection does not need to look at imported objects.
gc.collect()
gc.freeze()

# Skip the normal exit: with torch's compiler loaded, libraries then print warnings about their own leaks.
atexit.register(os._exit, 0)
