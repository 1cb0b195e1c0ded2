"""Long-lived worker ranks that serve many distributed tests.

Four processes are forked once per pytest session from one that has imported everything (`forking.py`), and every
`run(function, world)` forms a fresh gloo group of the first `world` of them. A function is sent by module and name and
must live in a test module; what it returns comes back, one item a rank.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forking
import torch.multiprocessing as mp

WORLD_MAX = 4


class RankError(AssertionError):
    """What a worker rank raised, with its traceback as text."""


def _form_group(rank: int, world: int, store: str) -> None:
    import deepspeed
    import torch.distributed as dist

    from engine.zero.processes import init_distributed, reset_distributed

    if dist.is_initialized():
        reset_distributed()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    init_distributed(init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.logger.setLevel("ERROR")


def _forget_previous_world() -> None:
    """Undo what DeepSpeed 0.19.8 leaves behind in a process, so that ranks with different pasts agree.

    Process groups of the world that is gone; ZeRO-3's own linear, whose gradients arrive in another order; and its
    counters of modules and parameters, which ranks compare with each other.
    """
    import torch
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    groups._WORLD_GROUP = groups.mesh_device = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._TENSOR_MODEL_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}
    torch.nn.functional.linear = _forget_previous_world.linear
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    Init.param_id = 0


def _serve(rank: int, tasks: mp.Queue, results: mp.Queue) -> None:
    # A test that hangs its ranks must not outlive pytest: the parent is watched while idle.
    import torch

    forking.as_if_started_by_a_shell()
    torch.set_num_threads(1)
    _forget_previous_world.linear = torch.nn.functional.linear
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    while True:
        try:
            task = tasks.get(timeout=5)
        except queue.Empty:
            if os.getppid() == 1:
                return
            continue
        if task is None:
            return
        module, name, args, world, store = task
        try:
            _form_group(rank, world, store)
            _forget_previous_world()
            torch.manual_seed(0)
            value = getattr(importlib.import_module(module), name)(*args)
            results.put((rank, True, value))
            # What DeepSpeed leaves behind stays: let no later collection look at it again, for mmengine and DeepSpeed
            # collect at every turn.
            del value
            gc.collect()
            gc.freeze()
        except BaseException:  # reported to the test, which fails with it
            results.put((rank, False, traceback.format_exc()))


class Ranks:
    """The pool. A call that fails or times out replaces the processes, so the next test starts clean."""

    def __init__(self) -> None:
        # Not daemons, for a run may start loader processes of its own: so they are stopped by hand whatever happens.
        atexit.register(self.stop)
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = forking.context()
        self._tasks = [context.Queue() for _ in range(WORLD_MAX)]
        self._results = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, self._tasks[rank], self._results)) for rank in range(WORLD_MAX)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable, world: int, *args: Any, timeout: float = 300) -> list[Any]:
        if not self._processes:
            self._start()
        store = tempfile.mktemp(prefix="gigadet-store-")
        for rank in range(world):
            self._tasks[rank].put((function.__module__, function.__name__, args, world, store))
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(values) + len(errors) < world:
            try:
                rank, ok, value = self._results.get(timeout=min(1.0, max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                # One rank that raised leaves the others waiting in a collective: give them a moment only.
                if time.monotonic() > deadline:
                    missing = sorted(set(range(world)) - set(values) - set(errors))
                    self.stop()
                    text = "\n".join(f"rank {r}:\n{t}" for r, t in errors.items())
                    raise RankError(f"ranks {missing} did not answer within {timeout:.0f} s\n{text}") from None
                continue
            if ok:
                values[rank] = value
            else:
                errors[rank] = value
                deadline = min(deadline, time.monotonic() + 2)
        if errors:
            self.stop()
            raise RankError("\n".join(f"rank {r}:\n{t}" for r, t in sorted(errors.items())))
        return [values[rank] for rank in range(world)]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)
        self._processes = []
