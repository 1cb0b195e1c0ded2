"""The work dir: how fast all ranks write to it, whether they see each other's files, and whether renaming is atomic."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine import distributed
from engine.doctor.finding import Finding
from engine.files import replacing

SIZE = 16 * 2**20  # bytes that each rank writes
PATIENCE = 5.0  # seconds until a change of rank 0 must be seen; network file systems keep names for a while


def write_speed(folder: Path) -> Finding:
    """All ranks write at the same time, as they do in a checkpoint."""
    path = folder / f"speed-{distributed.rank()}"
    block = os.urandom(2**20)  # some file systems compress
    distributed.barrier()
    began = time.monotonic()
    try:
        with open(path, "wb") as file:
            for _ in range(SIZE // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    seconds = max(distributed.all_gather_objects(time.monotonic() - began))
    speed = SIZE * distributed.world_size() / seconds
    return Finding(
        f"{speed / 1e6:.0f} MB/s to {folder.parent}, all ranks at once, synced",
        details={"bytes_per_second": speed, "seconds": seconds},
    )


def shared_and_atomic(folder: Path) -> Finding:
    """Rank 0 replaces a file and renames a folder; every rank must see both, and never a half of either."""
    slowest = 0.0
    path, before, after = folder / "shared", folder / "aside", folder / "final"
    problem = None
    for text in ("one", "two" * 100_000):
        if distributed.rank() == 0:
            with replacing(path) as aside:
                aside.write_text(text)
        distributed.barrier()
        seconds, seen = _until(lambda text=text: path.read_text() == text)
        problem = problem or (None if seen else "does not see a file that rank 0 wrote")
        slowest = max(slowest, seconds)
        distributed.barrier()
    if distributed.rank() == 0:
        before.mkdir()
        (before / "inside").write_text("whole")
        before.rename(after)
    distributed.barrier()
    seconds, seen = _until(lambda: (after / "inside").read_text() == "whole" and not before.exists())
    problem = problem or (None if seen else "does not see a folder that rank 0 renamed")
    slowest = max(distributed.all_gather_objects(max(slowest, seconds)))
    if problem is not None:
        return Finding(f"{problem} within {PATIENCE:.0f} s: the work dir must be one folder for all nodes", False)
    return Finding(f"all ranks see what rank 0 replaced or renamed, after {slowest * 1e3:.0f} ms (at most 5000)")


def _until(condition) -> tuple[float, bool]:
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began, True
        except OSError:
            pass
        if time.monotonic() - began > PATIENCE:
            return time.monotonic() - began, False
        time.sleep(0.01)
