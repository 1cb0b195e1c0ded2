"""`manifest.json`: the files of all ranks in a checkpoint folder, with sizes and checksums, and what is in them.

It is the last file written: a folder without it was never finished.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.files import write_synced
from engine.zero.checked_files import FileRecord, checksum

NAME = "manifest.json"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    world: int
    stage: int
    layout: str  # the class of engine/zero/layout.py that laid out the shards
    precision: str
    parameters: dict[str, list[int]]  # the trained ones: name and shape in files
    aliases: dict[str, str] = field(default_factory=dict)  # further names of shared parameters -> the name above
    files: dict[str, FileRecord]  # name -> size, CRC-32
    version: int = VERSION

    def write(self, folder: Path) -> None:
        text = json.dumps(
            {**asdict(self), "files": {name: list(record) for name, record in self.files.items()}}, indent=1
        )
        write_synced(folder / NAME, text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """CheckpointError if the folder is not a checkpoint that this program reads."""
        path = folder / NAME
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            version = content["version"]
            if version != VERSION:
                raise CheckpointError(f"checkpoint {folder} has format {version}; this program reads format {VERSION}")
            content["files"] = {name: FileRecord(*record) for name, record in content["files"].items()}
            return cls(**content)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {folder} has no {NAME}: its saving was never finished") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged ({type(error).__name__}: {error})") from None

    def damage(self, folder: Path, *, part: int = 0, parts: int = 1, contents: bool = True) -> str | None:
        """What is wrong with the files, or None. Ranks can share the work: each checks `part` of `parts`."""
        for name in sorted(self.files)[part::parts]:
            wanted = self.files[name]
            try:
                size = (folder / name).stat().st_size
                if size != wanted.size:
                    return f"{name} has {size} bytes instead of {wanted.size}"
                if contents and checksum(folder / name) != wanted:
                    return f"{name} has another checksum than when it was written"
            except FileNotFoundError:
                return f"{name} is missing"
            except OSError as error:
                return f"{name} cannot be read ({error.strerror})"
        return None
