"""Saving a run: every rank writes aside, all agree that all is there, then one rename makes it the newest checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.errors import SaveError
from engine.checkpoints.manifest import Manifest
from engine.checkpoints.zero_folder import CLIENT_KEY, EMA, rank_file
from engine.statistics import local_statistics
from engine.zero.layout import Layout
from engine.zero.scalars import file_shape
from engine.zero.stored import saved_scale

if TYPE_CHECKING:
    from engine.building import Run


def checkpoints_of(work_dir: Path) -> Path:
    return work_dir / "checkpoints"


def save_checkpoint(run: Run, step: int) -> None:
    """Write `checkpoints/step-N`; SaveError, alike on all ranks, where it cannot be written."""
    from engine.checkpoints.writer import CheckedWriter  # imports DeepSpeed

    folder, tag = checkpoints_of(run.work_dir), store.tag_of(step)
    aside = folder
    failure = None
    if distributed.rank() == 0:
        try:
            aside = store.open_aside(folder, tag)
        except OSError as error:
            failure = f"{folder}: {error.strerror}"
    _stop_if_any(failure)
    aside = Path(distributed.broadcast_object(str(aside)))
    writer = CheckedWriter()
    engine = run.engine
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda _: None  # launch/export.py does that, and a full disk would raise here
    engine.save_checkpoint(
        str(aside.parent), tag=aside.name, client_state={CLIENT_KEY: _meta(run, step)}, save_latest=False
    )
    writer.save(_of_this_rank(run), str(aside / rank_file(distributed.rank())))
    reports = distributed.gather_objects((writer.written, writer.failure))
    if reports is not None:
        failure = next((text for _, text in reports if text), None)
        if failure is None:
            try:
                files = {name: record for written, _ in reports for name, record in written.items()}
                manifest = _manifest(run, step, files)
                # As this node sees the other nodes' files: a work dir that is not shared shows here.
                damage = manifest.damage(aside, contents=False)
                if len(files) != sum(len(written) for written, _ in reports):
                    damage = "two ranks wrote the same file"
                if damage is None:
                    manifest.write(aside)
                    store.make_current(folder, aside, tag)
                failure = damage and f"{aside}: {damage}"
            except OSError as error:
                failure = f"{folder}: {error.strerror}"
        if failure is not None:
            shutil.rmtree(aside, ignore_errors=True)
    _stop_if_any(failure)


def prune_checkpoints(run: Run, best: int | None) -> None:
    """Remove what is beyond keep_last, but for the best."""
    if distributed.rank() == 0:
        folder = checkpoints_of(run.work_dir)
        try:
            store.prune(folder, keep_last=run.config.run.keep_last, keep=best)
        except OSError as error:
            print(f"old checkpoints could not be removed ({folder}: {error.strerror})", flush=True)


def _stop_if_any(failure: str | None) -> None:
    """Raise on all ranks what went wrong on rank 0."""
    failure = distributed.broadcast_object(failure)
    if failure is not None:
        raise SaveError(f"the checkpoint could not be written ({failure}); those saved before are untouched")


def _meta(run: Run, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "config": run.config.to_json(),
        "dataset_meta": run.classes.to_meta(),
        "loss_scale": saved_scale(run.layout.scaler()),
    }


def _of_this_rank(run: Run) -> dict[str, Any]:
    # At stage 0 all ranks hold the same: what rank 0 has is saved.
    held = [] if run.stage == 0 and distributed.rank() else run.layout.held()
    rows = [(f.param, f.start, f.stop, f.shard, f.offset) for f in held]
    content: dict[str, Any] = {
        "fragments": torch.tensor(rows, dtype=torch.int64).view(-1, 5),
        "statistics": local_statistics(run.engine.module),
    }
    if run.ema is not None:
        content[EMA] = run.ema.shards if held else {}
    return content


def _manifest(run: Run, step: int, files: dict[str, Any]) -> Manifest:
    names = parameter_names(run.engine.module, run.layout)
    first = {id(parameter): name for name, parameter in reversed(_all_names(run.engine.module))}
    return Manifest(
        step=step,
        world=distributed.world_size(),
        stage=run.stage,
        layout=type(run.layout).__name__,
        precision=str(run.precision.dtype).removeprefix("torch."),
        parameters={name: list(file_shape(parameter)) for name, parameter in zip(names, run.layout.params)},
        aliases={name: first[id(p)] for name, p in _all_names(run.engine.module) if first[id(p)] != name},
        files=files,
    )


def _all_names(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def parameter_names(model: nn.Module, layout: Layout) -> list[str]:
    """The names of a layout's parameters, in its order; of shared ones the first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in layout.params]
