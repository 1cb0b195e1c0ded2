"""Find and check a checkpoint in what the user names: a work dir, its `checkpoints`, a `step-N` or universal folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from engine import distributed
from engine.checkpoints import store
from engine.checkpoints.manifest import NAME as MANIFEST
from engine.checkpoints.manifest import Manifest
from engine.checkpoints.universal import LAYOUT as UNIVERSAL
from engine.checkpoints.universal import UniversalFolder
from engine.checkpoints.zero_folder import ZeroFolder
from engine.errors import CheckpointError
from engine.files import CHECKPOINTS

Checkpoint = ZeroFolder | UniversalFolder


def open_checkpoint(path: Path, *, contents: bool = True) -> Checkpoint:
    """Open a checkpoint folder and check its files; ranks share the work. Without `contents` only sizes are checked."""
    failure, manifest = None, None
    try:
        manifest = Manifest.read(path)
        damage = manifest.damage(path, part=distributed.rank(), parts=distributed.world_size(), contents=contents)
        failure = damage and f"checkpoint {path} is damaged: {damage}"
    except CheckpointError as error:
        failure = str(error)
    failure = next((text for text in distributed.all_gather_objects(failure) if text), None)
    if failure is not None or manifest is None:
        raise CheckpointError(str(failure))
    return (UniversalFolder if manifest.layout == UNIVERSAL else ZeroFolder)(path, manifest)


def checkpoints_folder(path: Path) -> Path:
    """The folder `checkpoints` of a work dir; the folder itself if it holds checkpoints."""
    return path if store.saved_steps(path) else path / CHECKPOINTS


def newest(folder: Path, say: Callable[[str], None], *, contents: bool = True) -> Checkpoint | None:
    """The newest undamaged checkpoint of a folder; None if none was ever saved."""
    steps = distributed.broadcast_object(store.saved_steps(folder))
    skipped: list[str] = []
    for step in reversed(steps):
        path = folder / store.tag_of(step)
        try:
            return open_checkpoint(path, contents=contents)
        except CheckpointError as error:
            if distributed.broadcast_object(path.is_dir()):  # else the run that works here has newer ones by now
                skipped.append(str(error))
                say(f"skipped: {error}")
    if skipped:
        raise CheckpointError(f"no checkpoint in {folder} is whole; the newest: {skipped[0]}")
    return newest(folder, say, contents=contents) if steps else None


def _tag_in(path: Path) -> str:
    """The tag in a file `latest` or `best`: the name of a folder beside it, and no path."""
    try:
        with open(path, "rb") as file:
            tag = file.read(100).decode().strip()
    except (OSError, UnicodeDecodeError):
        tag = ""
    if not re.fullmatch(r"step-\d{6,}", tag):
        raise CheckpointError(f'{path} does not hold a tag such as "step-000384": name the folder instead')
    return tag


def find_checkpoint(
    name: str | Path, say: Callable[[str], None] = lambda _: None, *, contents: bool = True
) -> Checkpoint:
    """The newest checkpoint of a work dir or `checkpoints` folder, or the one that is named."""
    path = Path(name).expanduser().absolute()
    if path.name in (store.LATEST, store.BEST) and path.is_file():  # files that hold a tag, as DeepSpeed writes them
        path = path.with_name(_tag_in(path))
    # Rank 0 decides: ranks that took different branches would wait for each other for ever.
    exists, is_one = distributed.broadcast_object(
        (path.is_dir(), (path / MANIFEST).exists() or path.name.startswith("step-"))
    )
    if not exists:
        raise CheckpointError(f"checkpoint folder {path} does not exist")
    if is_one:
        return open_checkpoint(path, contents=contents)
    found = newest(checkpoints_folder(path), say, contents=contents)
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a work dir, a folder step-N in its checkpoints, or a universal folder"
        )
    return found
