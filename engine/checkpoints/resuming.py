"""Going on: a checkpoint's values into a run that was built anew, on whatever ranks and stage it has now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import torch

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.finding import Checkpoint
from engine.checkpoints.saving import parameter_names
from engine.checkpoints.zero_folder import EMA
from engine.monitoring.records import cut_records
from engine.statistics import restore_statistics
from engine.weights import copy_into
from engine.zero.scalars import file_shape
from engine.zero.stored import fill

if TYPE_CHECKING:
    from engine.building import Run

RECORDS = ("metrics.jsonl", "evaluations.jsonl")


def restore(run: "Run", checkpoint: Checkpoint, progress: Callable[[int], None]) -> None:
    """Weights, moments, averages, statistics, loss scale, counters and AGVM's state, by the names of parameters."""
    names = parameter_names(run.engine.module, run.layout)
    with distributed.together():
        _check_fits(run, names, checkpoint)
    states = tuple(state for state in checkpoint.states if state != EMA)
    with distributed.together():
        fill(run.layout, names, run.optimizer, states=states, read=checkpoint.read, scalars=checkpoint.scalars,
             progress=progress)
    if run.ema is not None:
        _fill_average(run, names, checkpoint)
    _copy_untrained(run, checkpoint)
    if checkpoint.manifest.world == run.plan.world:
        restore_statistics(run.engine.module, checkpoint.statistics(distributed.rank()))
    scaler = run.layout.scaler()
    for key, value in checkpoint.meta["loss_scale"].items():
        if scaler is not None and hasattr(scaler, key) and run.precision.dtype == torch.float16:
            setattr(scaler, key, value)
    _set_counters(run, checkpoint)
    modulator = getattr(run.optimizer, "modulator", None)
    if modulator is not None and checkpoint.agvm is not None:
        run.optimizer.load_agvm_state_dict(checkpoint.agvm)


def _check_fits(run: "Run", names: list[str], checkpoint: Checkpoint) -> None:
    here = {name: tuple(file_shape(parameter)) for name, parameter in zip(names, run.layout.params)}
    for name in here.keys() ^ checkpoint.parameters.keys():
        where = "trained here but not in the checkpoint" if name in here else "in the checkpoint but not trained here"
        raise CheckpointError(f"parameter {name} is {where}: the model or what is frozen in it has changed")
    for name, shape in here.items():
        if shape != checkpoint.parameters[name]:
            raise CheckpointError(f"parameter {name} is {checkpoint.parameters[name]} in the checkpoint and {shape} here")


def _fill_average(run: "Run", names: list[str], checkpoint: Checkpoint) -> None:
    if EMA not in checkpoint.states:  # switched on since
        run.ema.restart()
        return
    for fragment in run.layout.held():
        values = checkpoint.read(names[fragment.param], EMA, fragment.start, fragment.stop)
        target = run.ema.shards[fragment.shard].view(-1)
        target[fragment.offset:fragment.offset + values.numel()].copy_(values)


def _copy_untrained(run: "Run", checkpoint: Checkpoint) -> None:
    model = run.engine.module
    targets = {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}
    for name, value in checkpoint.untrained():
        if name in targets:
            copy_into(targets[name], value)


def _set_counters(run: "Run", checkpoint: Checkpoint) -> None:
    """DeepSpeed's own: AGVM's windows and the boundary of accumulation are counted by them."""
    engine, counters = run.engine, checkpoint.counters()
    engine.global_steps = checkpoint.step
    engine.micro_steps = checkpoint.step * run.plan.accumulation
    engine.global_samples = checkpoint.step * run.plan.total
    engine.skipped_steps = int(counters.get("skipped_steps", 0))


def carry_records(work_dir: Path, source: Path, step: int) -> None:
    """The records up to the checkpoint's step; what a killed run wrote after it is computed again."""
    for name in RECORDS:
        cut_records(source / name, work_dir / name, last_step=step)


def set_aside_newer(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Checkpoints after the one that is resumed are damaged or of a future given up: kept, but no longer newest."""
    for newer in store.saved_steps(folder):
        if newer > step:
            tag = store.tag_of(newer)
            target = folder / f"set-aside-{tag}"
            shutil.rmtree(target, ignore_errors=True)
            (folder / tag).rename(target)
            say(f"{tag} lies after the checkpoint that is resumed: renamed {target.name}")
