"""Arrays that one rank of each node makes, and that the other ranks of the node map from a file.

The files lie in the folder for temporary files (TMPDIR), which is local to a node, and are removed as soon as all ranks
of the node have mapped them: the mapping stays, and nothing is left behind by a run that is killed.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from engine import distributed
from engine.errors import DataError

Arrays = dict[str, np.ndarray]


def shared_by_node(make: Callable[[], Arrays], what: str) -> Arrays:
    """The arrays that `make` returns, made by the first rank of each node. All ranks call this; an error of one is an
    error of all.

    A rank that does not see the files of its node's first rank (a container of its own) makes the arrays itself.
    """
    if distributed.world_size() == 1:
        return make()
    first = distributed.local_rank() == 0
    folder: Path | None = None
    try:
        with distributed.together():
            if first:
                made = make()
                folder = _write(made, what)
                del made  # from here on the first rank maps the files like the others
        known = distributed.all_gather_objects((socket.gethostname(), str(folder) if folder else None))
        with distributed.together():
            here = socket.gethostname()
            published = (Path(path) for host, path in known if host == here and path is not None)
            seen = folder or next((path for path in published if path.is_dir()), None)
            arrays = make() if seen is None else _map(seen, what)
    finally:  # `together` has waited for all ranks, so all have mapped the files
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return arrays


def _write(arrays: Arrays, what: str) -> Path:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="gigadet-shared-"))
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        return folder
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise DataError(
            f"{what} cannot be shared with the other ranks of this node through {tempfile.gettempdir()} "
            f"({error.strerror or error}): set TMPDIR to a folder that is writable and has room"
        ) from None


def _map(folder: Path, what: str) -> Arrays:
    try:
        return {path.stem: _mapped(path) for path in sorted(folder.glob("*.npy"))}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{what} cannot be read from {folder}, where another rank of this node wrote it: {error}"
        ) from None


def _mapped(path: Path) -> np.ndarray:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    # As a plain array, for those of type memmap are slow to slice. It keeps the mapping alive.
    return np.asarray(array).view(np.ndarray)
