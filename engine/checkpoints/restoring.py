"""Restore a checkpoint into a newly built run, on any number of ranks and at any stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.best import best_step
from engine.checkpoints.finding import Checkpoint
from engine.checkpoints.saving import parameter_names
from engine.checkpoints.state import TrainingState
from engine.checkpoints.zero_folder import EMA
from engine.errors import CheckpointError
from engine.files import EVALUATIONS, METRICS
from engine.modeling.statistics import restore_statistics
from engine.monitoring.records import cut_records, read_records
from engine.optim.agvm import AGVMOptimizer
from engine.optim.ema import ShardEMA
from engine.zero.loss_scale import restore_scale
from engine.zero.scalars import file_shape
from engine.zero.stored import fill
from engine.zero.whole_parameters import copy_into

_RECORD_FILES = (METRICS, EVALUATIONS)


def restore(state: TrainingState, checkpoint: Checkpoint, progress: Callable[[int], None]) -> None:
    """Restore weights, moments, averages, statistics, loss scale, counters and AGVM's state, by parameter name."""
    names = parameter_names(state.engine.module, state.layout)
    with distributed.together():
        _check_fits(state, names, checkpoint)
        checkpoint.check_shapes()
    with distributed.together():  # no collectives inside: a file that only one rank reads may be damaged
        states = tuple(name for name in checkpoint.states if name != EMA)
        fill(
            state.layout,
            names,
            state.optimizer,
            states=states,
            read=checkpoint.read,
            scalars=checkpoint.scalars,
            progress=progress,
        )
        if state.ema is not None:
            _fill_average(state.ema, names, checkpoint)
        # Of a parameter that is partitioned here, rank 0 alone gives the value.
        untrained = dict(checkpoint.untrained(frozen_parts=distributed.rank() == 0 or state.stage < 3))
        same_ranks = checkpoint.manifest.world == state.batch.world
        statistics = checkpoint.statistics(distributed.rank()) if same_ranks else {}
    state.layout.publish()
    _copy_untrained(state, untrained)
    restore_statistics(state.engine.module, statistics)
    restore_scale(state.layout.scaler(), checkpoint.meta["loss_scale"])
    _set_counters(state, checkpoint)
    if isinstance(state.optimizer, AGVMOptimizer) and checkpoint.agvm is not None:
        state.optimizer.load_agvm_state_dict(checkpoint.agvm)


def _check_fits(state: TrainingState, names: list[str], checkpoint: Checkpoint) -> None:
    here = {name: tuple(file_shape(parameter)) for name, parameter in zip(names, state.layout.params)}
    for name in sorted(here.keys() ^ checkpoint.parameters.keys()):
        where = "trained here but not in the checkpoint" if name in here else "in the checkpoint but not trained here"
        raise CheckpointError(f"parameter {name} is {where}: the model or what is frozen in it has changed")
    for name, shape in here.items():
        if shape != checkpoint.parameters[name]:
            raise CheckpointError(
                f"parameter {name} is {checkpoint.parameters[name]} in the checkpoint and {shape} here"
            )


def _fill_average(ema: ShardEMA, names: list[str], checkpoint: Checkpoint) -> None:
    if EMA not in checkpoint.states:  # run.ema was switched on after the checkpoint
        ema.restart()
        return
    for fragment in ema.layout.held():
        values = checkpoint.read(names[fragment.param], EMA, fragment.start, fragment.stop)
        target = ema.shards[fragment.shard].view(-1)
        target[fragment.offset : fragment.offset + values.numel()].copy_(values)


def _copy_untrained(state: TrainingState, values: dict[str, Tensor]) -> None:
    model = state.engine.module
    targets = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    for name, value in values.items():
        if name in targets:
            copy_into(targets[name], value)


def _set_counters(state: TrainingState, checkpoint: Checkpoint) -> None:
    """Set DeepSpeed's own counters: AGVM's windows and gradient accumulation depend on them."""
    engine, counters = state.engine, checkpoint.counters()
    engine.global_steps = checkpoint.step
    engine.micro_steps = checkpoint.step * state.batch.accumulation
    engine.global_samples = checkpoint.step * state.batch.total
    engine.skipped_steps = int(counters.get("skipped_steps", 0))


def take_over(work_dir: Path, checkpoint: Checkpoint, *, keep_best: str | None, say: Callable[[str], None]) -> None:
    """Bring the work dir to the state of a run that stopped at the checkpoint's step. Call it on rank 0."""
    source, folder = checkpoint.folder.parent.parent.resolve(), checkpoint.folder.parent
    try:
        if source == work_dir:  # before the records of the later steps are removed
            _set_aside_newer(folder, checkpoint.step, say)
        for name in _RECORD_FILES:
            cut_records(source / name, work_dir / name, last_step=checkpoint.step)
        if source == work_dir:
            best = best_step(read_records(work_dir / EVALUATIONS), keep_best)
            store.write_tag(folder / store.LATEST, store.tag_of(checkpoint.step))
            if best in store.saved_steps(folder):
                store.write_tag(folder / store.BEST, store.tag_of(best))
            else:
                (folder / store.BEST).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"work dir {work_dir} cannot be written ({error.strerror})") from None


def _set_aside_newer(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename checkpoints after the resumed one: they are damaged, or of steps that will be trained again."""
    for newer in store.saved_steps(folder):
        if newer > step:
            tag = store.tag_of(newer)
            names = (f"{store.SET_ASIDE}{tag}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            target = next(folder / name for name in names if not (folder / name).exists())
            (folder / tag).rename(target)
            say(f"{tag} lies after the checkpoint that is resumed: renamed {target.name}")
