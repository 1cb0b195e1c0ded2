"""The folder of a run: a new one, or the one of a run that is resumed. Which of the two is never guessed.

One run at a time works in it. Rank 0 holds it (`engine.folder_lock`) until the run has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import distributed, folder_lock
from engine.checkpoints.finding import Checkpoint, find_checkpoint, newest
from engine.checkpoints.manifest import NAME as MANIFEST
from engine.checkpoints.store import checkpoints_of, clean_up
from engine.checkpoints.universal import UniversalFolder
from engine.config import RunConfig
from engine.config.origin import Origin
from engine.distributed import say
from engine.errors import ConfigError
from engine.files import CONFIG, EVALUATIONS, METRICS, PART
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
    """The run's folder, held for it, and the checkpoint to resume from. All ranks call this together."""
    if resume is None:
        return _take_new(config), None
    if resume.source is not None:
        checkpoint = find_checkpoint(resume.source, contents=False)
        own = None if isinstance(checkpoint, UniversalFolder) else checkpoint.folder.parent.parent.resolve()
        if own is not None and (not config.run.work_dir or Path(config.run.work_dir).resolve() == own):
            path = _take(own)
        else:
            path = _take_new(config)
        return path, find_checkpoint(resume.source, say)  # again: until now another run may have saved and pruned
    if config.run.work_dir is None:
        raise ConfigError(
            "--resume does not say which run: give its folder, --resume WORK_DIR" + _candidates(config.name)
        )
    path = _take(Path(config.run.work_dir).resolve())
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
    path = Path(config.run.work_dir or _stamped(config)).resolve()
    if reason := _used(path):
        raise ConfigError(reason)
    above = next(folder for folder in (path, *path.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        reason = "not writable" if above.is_dir() else "a file"
        raise ConfigError(f"work dir {path} cannot be written: {above} is {reason}")
    return path


def _stamped(config: RunConfig) -> Path:
    return Path("work_dirs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _candidates(name: str) -> str:
    runs = sorted(path.parent for path in Path("work_dirs").glob(f"{name}-*/checkpoints"))
    return f", such as {runs[-1]}" if runs else ""


def _take_new(config: RunConfig) -> Path:
    """The folder that the config names, which must be free, or one with the time in its name."""
    if config.run.work_dir:
        return _take(Path(config.run.work_dir).resolve(), unused=True)
    return _take(_stamped(config).resolve(), apart=True, unused=True)


def _take(path: Path, *, unused: bool = False, apart: bool = False) -> Path:
    """Make the folder, hold it and clean it up, all on rank 0. It must be `unused`, or is resumed. With `apart` another
    name is tried if a run began in the same second."""
    failure = None
    if distributed.rank() == 0:
        try:
            path = _make_apart(path) if apart else path
            path.mkdir(parents=True, exist_ok=True)
            folder_lock.hold(path, say)
            failure = _used(path) if unused else None
            if failure is None:
                (path / METRICS).touch()
                _clean_up(path)
            else:
                folder_lock.release_all()
        except OSError as error:
            failure = f"work dir {path} cannot be written: {error.strerror}"
        except folder_lock.InUse as error:
            failure = f"work dir {error}"
    failure, path = distributed.broadcast_object((failure, path))
    if failure is not None:
        raise ConfigError(failure)
    return path


def _make_apart(path: Path) -> Path:
    for number in itertools.count(1):
        other = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            other.mkdir(parents=True)
            return other
    raise AssertionError("unreachable")


def _used(path: Path) -> str | None:
    """Why a new run may not have this folder: there is more in it than the lock, and than what a run leaves that failed
    before its first step."""
    records = path / METRICS
    left = {records.name, CONFIG, CONFIG + PART} if records.is_file() and not records.stat().st_size else set()
    if not (path.is_dir() and any(not (entry.name in left or folder_lock.is_lock(entry)) for entry in path.iterdir())):
        return None
    what = "already holds a run" if records.exists() or checkpoints_of(path).exists() else "is not empty"
    return f"work dir {path} {what}: continue it with --resume, or start a new run in another with --work-dir"


def _clean_up(path: Path) -> None:
    """Remove what a killed run was writing, and name what is kept though no run uses it."""
    for part in path.glob(f"*.*{PART}"):
        if part.name.removesuffix(PART).endswith((".json", ".jsonl", ".png")):
            part.unlink(missing_ok=True)
    checkpoints = checkpoints_of(path)
    if set_aside := clean_up(checkpoints, finished=MANIFEST):
        say(
            f"kept    {', '.join(set_aside)} in {checkpoints}: later than a checkpoint that was resumed, or damaged; "
            "no run uses them, so delete them if you do not need them"
        )
