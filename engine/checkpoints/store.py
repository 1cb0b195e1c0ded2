"""The folder `checkpoints` of a work dir: its names, the atomic rename of a finished checkpoint, and cleaning up."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from engine.files import CHECKPOINTS, PART, replacing, write_synced
from engine.zero.checked_files import sync_folder

LATEST = "latest"  # DeepSpeed's name and form: the tag of the newest checkpoint
BEST = "best"  # the same for the best one
SET_ASIDE = "set-aside-"  # a checkpoint after the one that was resumed: kept, and never used by itself
_ASIDE, _GONE = ".saving-", ".removing-"


def checkpoints_of(work_dir: Path) -> Path:
    return work_dir / CHECKPOINTS


def tag_of(step: int) -> str:
    return f"step-{step:06d}"


def saved_steps(folder: Path) -> list[int]:
    """Steps with a finished (or damaged) checkpoint, ascending; one that is being written does not count."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{6,})", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def clean_up(folder: Path, finished: str) -> list[str]:
    """Put right what a killed run left; the names of what stays and is used by nobody. Only for the folder's own run.

    A checkpoint that has its file `finished`, the last to be written, only lacks its name and gets it.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        target = folder / path.name.removeprefix(_ASIDE)
        if path.name.startswith(_ASIDE) and (path / finished).exists() and not target.exists():
            path.rename(target)
        elif path.name.startswith((_ASIDE, _GONE)):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name in (LATEST + PART, BEST + PART):
            path.unlink(missing_ok=True)
    return sorted(path.name for path in folder.glob(f"{SET_ASIDE}*"))


def open_aside(folder: Path, tag: str) -> Path:
    """An empty folder to write into, next to the checkpoints; leftovers of failed attempts are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name.startswith((_ASIDE, _GONE)):
            shutil.rmtree(path, ignore_errors=True)
    aside = folder / (_ASIDE + tag)
    aside.mkdir()
    return aside


def make_current(folder: Path, aside: Path, tag: str) -> None:
    """Rename the folder into place. An older one of the same step (damaged, or the run was set back) is replaced."""
    sync_folder(aside)
    target = folder / tag
    if target.exists():
        target.rename(folder / (_GONE + tag))
    aside.rename(target)
    shutil.rmtree(folder / (_GONE + tag), ignore_errors=True)
    with contextlib.suppress(OSError):  # the checkpoint exists now; `--resume` does not need this file
        sync_folder(folder)
        write_tag(folder / LATEST, tag)


def prune(folder: Path, *, keep_last: int, keep: int | None) -> None:
    """Remove all but the newest `keep_last` and the step `keep`. Renamed first, so no half-removed one is found."""
    for step in saved_steps(folder)[:-keep_last]:
        if step != keep:
            gone = folder / (_GONE + tag_of(step))
            (folder / tag_of(step)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def write_tag(path: Path, tag: str) -> None:
    with replacing(path) as aside:
        write_synced(aside, tag)
