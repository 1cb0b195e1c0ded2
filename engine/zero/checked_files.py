"""Checkpoint files: written with a checksum and synced to disk; read without running pickled code."""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.errors import CheckpointError, first_line
from engine.zero.archives import ArchiveError, check_archive, check_tensors

CHUNK = 1 << 24


class FileRecord(NamedTuple):
    size: int
    crc32: int


class _CheckedFile:
    """A file that computes the checksum while it is written: of the intended bytes, and without reading them again."""

    def __init__(self, file: Any) -> None:
        self.file, self.size, self.crc32 = file, 0, 0

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        # An unbuffered file may write fewer bytes than it was given.
        rest = data
        while len(rest):
            rest = rest[self.file.write(rest) :]
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, content: Any) -> FileRecord:
    """Write with torch.save and sync to disk; OSError if that fails."""
    with open(path, "wb", buffering=0) as file:
        checked: Any = _CheckedFile(file)
        try:
            torch.save(content, checked)
        except RuntimeError as error:  # torch's zip writer hides an OSError of the file behind its own error
            cause = error.__cause__ or error.__context__
            raise cause if isinstance(cause, OSError) else OSError(0, first_line(error)) from None
        os.fsync(file.fileno())
    return FileRecord(checked.size, checked.crc32)


def checksum(path: Path) -> FileRecord:
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileRecord(size, crc)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk, not only the files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path) -> Any:
    """The content of a file of ours or DeepSpeed's, memory-mapped; pickled code is refused."""
    try:
        check_archive(path)
        with torch.serialization.safe_globals(_deepspeed_classes()):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_tensors(content)
        return content
    except ArchiveError as error:
        raise CheckpointError(f"checkpoint file {path} {error}") from None
    except pickle.UnpicklingError as error:
        named = [line for line in str(error).splitlines() if "GLOBAL" in line or "global" in line]
        reason = (named or str(error).splitlines() or ["unknown"])[0].strip()
        raise CheckpointError(f"checkpoint file {path} holds more than plain data and is refused ({reason})") from None
    except Exception as error:  # torch's reader raises errors of many types for a file that is none of its own
        raise CheckpointError(f"checkpoint file {path} cannot be read ({first_line(error)})") from None


def _deepspeed_classes() -> list[Any]:
    """The classes that DeepSpeed 0.19.8 pickles into its files: records with attributes only, no code."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [ZeroStageEnum, fragment_address, loss_scaler.LossScaler, loss_scaler.DynamicLossScaler]
