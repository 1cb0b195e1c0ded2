"""Save a run: every rank writes to a hidden folder, rank 0 checks that all files are there and renames the folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import distributed, heartbeat
from engine.checkpoints import store
from engine.checkpoints.manifest import Manifest
from engine.checkpoints.saved_geometry import NAME as GEOMETRY
from engine.checkpoints.saved_geometry import as_table
from engine.checkpoints.state import TrainingState
from engine.checkpoints.store import checkpoints_of
from engine.checkpoints.zero_folder import AGVM_KEY, CLIENT_KEY, EMA, rank_file
from engine.errors import SaveError
from engine.modeling.statistics import joined_statistics, local_statistics
from engine.optim.agvm import AGVMOptimizer
from engine.zero.layout import Layout
from engine.zero.loss_scale import saved_scale
from engine.zero.scalars import file_shape
from engine.zero.stored import stored_states


def save_checkpoint(state: TrainingState, work_dir: Path, step: int) -> None:
    """Write `checkpoints/step-N`; SaveError, on all ranks, if it cannot be written."""
    from engine.zero.checked_writer import save_with  # here, because importing DeepSpeed takes seconds

    folder, tag = checkpoints_of(work_dir), store.tag_of(step)
    aside = folder
    failure = None
    if distributed.rank() == 0:
        try:
            aside = store.open_aside(folder, tag)
        except OSError as error:
            failure = f"{folder}: {error.strerror}"
    _stop_if_any(failure)
    aside = Path(distributed.broadcast_object(str(aside)))
    client_state = {CLIENT_KEY: _meta(state, step)}
    if isinstance(state.optimizer, AGVMOptimizer):
        client_state[AGVM_KEY] = state.optimizer.agvm_state_dict()
    joined = joined_statistics(state.engine.module)
    writer = save_with(state.engine, aside, client_state)
    writer.save(_of_this_rank(state), str(aside / rank_file(distributed.rank())))
    if distributed.rank() == 0:
        writer.save(_of_all_ranks(state, joined), str(aside / GEOMETRY))
    reports = distributed.gather_objects((writer.written, writer.failure))
    if reports is not None:
        failure = next((text for _, text in reports if text), None)
        if failure is None:
            try:
                files = {name: record for written, _ in reports for name, record in written.items()}
                manifest = _manifest(state, step, files)
                # Rank 0 must see the files of all nodes: a work dir that is not shared is noticed here.
                damage = manifest.damage(aside, contents=False)
                if len(files) != sum(len(written) for written, _ in reports):
                    damage = "two ranks wrote the same file"
                if damage is None:
                    with heartbeat.finishing():  # the other ranks have done their part, so their loss changes nothing
                        manifest.write(aside)
                        store.make_current(folder, aside, tag)
                failure = damage and f"{aside}: {damage}"
            except OSError as error:
                failure = f"{folder}: {error.strerror}"
        if failure is not None:
            shutil.rmtree(aside, ignore_errors=True)
    _stop_if_any(failure)


def prune_checkpoints(work_dir: Path, *, keep_last: int, best: int | None) -> None:
    """Remove all but the last `keep_last` checkpoints and the best one."""
    if distributed.rank() == 0:
        folder = checkpoints_of(work_dir)
        try:
            store.prune(folder, keep_last=keep_last, keep=best)
        except OSError as error:
            print(f"old checkpoints could not be removed ({folder}: {error.strerror})", flush=True)


def _stop_if_any(failure: str | None) -> None:
    """Raise the failure of rank 0 on all ranks."""
    failure = distributed.broadcast_object(failure)
    if failure is not None:
        raise SaveError(f"the checkpoint could not be written ({failure}); those saved before are untouched")


def _meta(state: TrainingState, step: int) -> dict[str, Any]:
    return {"step": step, **state.meta, "loss_scale": saved_scale(state.layout.scaler())}


def _of_this_rank(state: TrainingState) -> dict[str, Any]:
    # At stage 0 all ranks hold the same, so only rank 0 saves it.
    held = [] if state.stage == 0 and distributed.rank() else state.layout.held()
    rows = [(f.param, f.start, f.stop, f.shard, f.offset) for f in held]
    content: dict[str, Any] = {
        "fragments": torch.tensor(rows, dtype=torch.int64).view(-1, 5),
        "statistics": local_statistics(state.engine.module),
    }
    if state.ema is not None:
        content[EMA] = state.ema.shards if held else {}
    return content


def _of_all_ranks(state: TrainingState, statistics: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a reader would otherwise have to ask the files of all ranks for."""
    first = next(iter(state.layout.shards().values()))
    return {
        **as_table(state.layout.geometry),
        "states": stored_states(state.optimizer.state.get(first, {}), first),
        "ema": state.ema is not None,
        "statistics": statistics,
    }


def _manifest(state: TrainingState, step: int, files: dict[str, Any]) -> Manifest:
    model, layout = state.engine.module, state.layout
    names = parameter_names(model, layout)
    first = {id(parameter): name for name, parameter in reversed(_all_names(model))}
    return Manifest(
        step=step,
        world=distributed.world_size(),
        stage=state.stage,
        layout=type(layout).__name__,
        precision=str(state.precision).removeprefix("torch."),
        parameters={name: list(file_shape(parameter)) for name, parameter in zip(names, layout.params)},
        aliases={name: first[id(p)] for name, p in _all_names(model) if first[id(p)] != name},
        files=files,
    )


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def parameter_names(model: nn.Module, layout: Layout) -> list[str]:
    """The names of a layout's parameters, in its order. A shared parameter has the first of its names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in layout.params]
