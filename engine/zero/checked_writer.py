"""Let DeepSpeed write its checkpoint files with our checksums, and without a rank stuck in a collective on failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from engine.zero.checked_files import FileRecord, read_file, write_file


class CheckedWriter(CheckpointEngine):
    """Records what this rank wrote, and its first failure. It does not raise: the other ranks wait in DeepSpeed's
    barriers, so all ranks give up together after them."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, FileRecord] = {}
        self.failure: str | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._fail(error, path)

    def save(self, state_dict: Any, path: str) -> None:
        if self.failure is None:
            try:
                self.written[Path(path).name] = write_file(Path(path), state_dict)
            except OSError as error:
                self._fail(error, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_file(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return self.failure is None

    def _fail(self, error: OSError, path: str) -> None:
        self.failure = self.failure or f"{path}: {error.strerror or error}"


def save_with(engine: Any, folder: Path, client_state: dict[str, Any]) -> CheckedWriter:
    """Save DeepSpeed's own files of this rank to a folder; the returned writer knows what was written or failed."""
    writer = CheckedWriter()
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda _: None  # launch/export.py replaces it, and a full disk would raise here
    engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state=client_state, save_latest=False)
    return writer
