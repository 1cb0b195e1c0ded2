"""Going on: a checkpoint's values into a run that was built anew, on whatever ranks and stage it has now."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.best import best_step
from engine.checkpoints.errors import CheckpointError
from engine.checkpoints.finding import Checkpoint
from engine.checkpoints.saving import parameter_names
from engine.checkpoints.zero_folder import EMA
from engine.monitoring.records import cut_records, read_records
from engine.statistics import restore_statistics
from engine.weights import copy_into
from engine.zero.scalars import file_shape
from engine.zero.stored import fill, restore_scale

if TYPE_CHECKING:
    from engine.building import Run

RECORD_FILES = ("metrics.jsonl", "evaluations.jsonl")


def restore(run: Run, checkpoint: Checkpoint, progress: Callable[[int], None]) -> None:
    """Weights, moments, averages, statistics, loss scale, counters and AGVM's state, by the names of parameters."""
    names = parameter_names(run.engine.module, run.layout)
    with distributed.together():
        _check_fits(run, names, checkpoint)
    with distributed.together():  # no collective in here: a file that only one rank reads may be bad
        states = tuple(state for state in checkpoint.states if state != EMA)
        fill(
            run.layout,
            names,
            run.optimizer,
            states=states,
            read=checkpoint.read,
            scalars=checkpoint.scalars,
            progress=progress,
        )
        if run.ema is not None:
            _fill_average(run, names, checkpoint)
        untrained = dict(checkpoint.untrained())
        alike = checkpoint.manifest.world == run.plan.world
        statistics = checkpoint.statistics(distributed.rank()) if alike else {}
    run.layout.publish()
    _copy_untrained(run, untrained)
    restore_statistics(run.engine.module, statistics)
    restore_scale(run.layout.scaler(), checkpoint.meta["loss_scale"])
    _set_counters(run, checkpoint)
    modulator = getattr(run.optimizer, "modulator", None)
    if modulator is not None and checkpoint.agvm is not None:
        run.optimizer.load_agvm_state_dict(checkpoint.agvm)


def _check_fits(run: Run, names: list[str], checkpoint: Checkpoint) -> None:
    here = {name: tuple(file_shape(parameter)) for name, parameter in zip(names, run.layout.params)}
    for name in here.keys() ^ checkpoint.parameters.keys():
        where = "trained here but not in the checkpoint" if name in here else "in the checkpoint but not trained here"
        raise CheckpointError(f"parameter {name} is {where}: the model or what is frozen in it has changed")
    for name, shape in here.items():
        if shape != checkpoint.parameters[name]:
            raise CheckpointError(
                f"parameter {name} is {checkpoint.parameters[name]} in the checkpoint and {shape} here"
            )


def _fill_average(run: Run, names: list[str], checkpoint: Checkpoint) -> None:
    if EMA not in checkpoint.states:  # switched on since
        run.ema.restart()
        return
    for fragment in run.layout.held():
        values = checkpoint.read(names[fragment.param], EMA, fragment.start, fragment.stop)
        target = run.ema.shards[fragment.shard].view(-1)
        target[fragment.offset : fragment.offset + values.numel()].copy_(values)


def _copy_untrained(run: Run, values: dict[str, Tensor]) -> None:
    model = run.engine.module
    targets = {
        **dict(model.named_buffers(remove_duplicate=False)),
        **dict(model.named_parameters(remove_duplicate=False)),
    }
    for name, value in values.items():
        if name in targets:
            copy_into(targets[name], value)


def _set_counters(run: Run, checkpoint: Checkpoint) -> None:
    """DeepSpeed's own: AGVM's windows and the boundary of accumulation are counted by them."""
    engine, counters = run.engine, checkpoint.counters()
    engine.global_steps = checkpoint.step
    engine.micro_steps = checkpoint.step * run.plan.accumulation
    engine.global_samples = checkpoint.step * run.plan.total
    engine.skipped_steps = int(counters.get("skipped_steps", 0))


def take_over(run: Run, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """Let the work dir be one that stopped at the checkpoint's step; on rank 0."""
    source, folder = checkpoint.folder.parent.parent.resolve(), checkpoint.folder.parent
    try:
        if source == run.work_dir:  # first, for the records of what lies after it go next
            _set_aside_newer(folder, checkpoint.step, say)
        for name in RECORD_FILES:
            cut_records(source / name, run.work_dir / name, last_step=checkpoint.step)
        if source == run.work_dir:
            best = best_step(read_records(run.work_dir / "evaluations.jsonl"), run.config.run.keep_best)
            store.write_tag(folder / store.LATEST, store.tag_of(checkpoint.step))
            if best in store.saved_steps(folder):
                store.write_tag(folder / store.BEST, store.tag_of(best))
            else:
                (folder / store.BEST).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"work dir {run.work_dir} cannot be written ({error.strerror})") from None


def _set_aside_newer(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Checkpoints after the one that is resumed are damaged or of a future given up: kept, but no longer newest."""
    for newer in store.saved_steps(folder):
        if newer > step:
            tag = store.tag_of(newer)
            names = (f"set-aside-{tag}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            target = next(folder / name for name in names if not (folder / name).exists())
            (folder / tag).rename(target)
            say(f"{tag} lies after the checkpoint that is resumed: renamed {target.name}")
