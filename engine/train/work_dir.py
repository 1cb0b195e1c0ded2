"""The folder of a run: a new one, or the one of a run that is resumed. Which of the two is never guessed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import distributed
from engine.checkpoints.finding import Checkpoint, find_checkpoint, newest
from engine.checkpoints.store import checkpoints_of
from engine.checkpoints.universal import UniversalFolder
from engine.config import RunConfig
from engine.config.origin import Origin
from engine.distributed import say
from engine.errors import ConfigError
from engine.files import CONFIG, EVALUATIONS, METRICS
from engine.monitoring.records import cut_records
from engine.recipes.load import carried_config


@dataclass(frozen=True)
class Resume:
    """Resume from the newest checkpoint of the work dir, or from the one at `source`."""

    source: str | None = None


def saved_config(source: str, overrides: Sequence[str] = (), *, origin: Origin = Origin.FILE) -> RunConfig:
    """The config of a checkpoint, to resume it: without its work dir, which follows from the checkpoint's folder, and
    without accumulation steps, which follow from the number of ranks. `origin` is USER if the user trusts its author.
    """
    checkpoint = find_checkpoint(source, contents=False)  # the contents are checked when it is opened
    own = ['gradient_accumulation_steps="auto"', "run.work_dir=null"]
    return carried_config(
        checkpoint.meta.get("config"), f"checkpoint {checkpoint.folder}", [*own, *overrides], origin=origin
    )


def open_work_dir(config: RunConfig, resume: Resume | None) -> tuple[Path, Checkpoint | None]:
    """The run's folder, and the checkpoint to resume from. All ranks call this together."""
    if resume is None:
        path = _default(config)
        _refuse_used(path)
        return _make(path), None
    if resume.source is not None:
        checkpoint = find_checkpoint(resume.source, say)
        own = None if isinstance(checkpoint, UniversalFolder) else checkpoint.folder.parent.parent.resolve()
        path = Path(config.run.work_dir).resolve() if config.run.work_dir else own or _default(config)
        if path != own:
            _refuse_used(path)
        return _make(path), checkpoint
    if config.run.work_dir is None:
        raise ConfigError(
            "--resume does not say which run: give its folder, --resume WORK_DIR" + _candidates(config.name)
        )
    path = _make(Path(config.run.work_dir).resolve())
    found = newest(checkpoints_of(path), say)
    if found is None:
        say(f"resume  no checkpoint in {path} yet: starting at step 0")
        if distributed.rank() == 0:
            for name in (METRICS, EVALUATIONS):
                cut_records(path / name, path / name, last_step=0)
        return path, None
    return path, found


def check_new_work_dir(config: RunConfig) -> Path:
    """Where a new run would write. Refuses what `open_work_dir` would refuse, and creates nothing."""
    path = _default(config)
    _refuse_used(path)
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "not writable" if above.is_dir() else "a file"
        raise ConfigError(f"work dir {path} cannot be written: {above} is {reason}")
    return path


def _default(config: RunConfig) -> Path:
    stamp = distributed.broadcast_object(time.strftime("%Y%m%d-%H%M%S"))
    return Path(config.run.work_dir or Path("work_dirs") / f"{config.name}-{stamp}").resolve()


def _candidates(name: str) -> str:
    runs = sorted(path.parent for path in Path("work_dirs").glob(f"{name}-*/checkpoints"))
    return f", such as {runs[-1]}" if runs else ""


def _refuse_used(path: Path) -> None:
    """Refuse a folder that is not empty, except for what a run leaves that failed before its first step."""
    records = path / METRICS
    left = {records.name, CONFIG} if records.is_file() and not records.stat().st_size else set()
    used = path.is_dir() and any(entry.name not in left for entry in path.iterdir())
    if distributed.broadcast_object(used):
        what = "already holds a run" if records.exists() or checkpoints_of(path).exists() else "is not empty"
        raise ConfigError(
            f"work dir {path} {what}: continue it with --resume, or start a new run in another with --work-dir"
        )


def _make(path: Path) -> Path:
    failure = None
    if distributed.rank() == 0:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / METRICS).touch()
        except OSError as error:
            failure = f"work dir {path} cannot be written: {error.strerror}"
    failure = distributed.broadcast_object(failure)
    if failure is not None:
        raise ConfigError(failure)
    return path
