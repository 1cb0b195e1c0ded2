"""`manifest.json`: the files of all ranks in a checkpoint folder, with sizes and checksums, and what is in them.

It is the last file written: a folder without it was never finished. It carries a checksum of itself. Those written
before 0.3 have none and are read all the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from engine.errors import CheckpointError, short
from engine.files import write_synced
from engine.plain_json import JsonError, read_json
from engine.zero.checked_files import FileRecord, checksum

NAME = "manifest.json"
VERSION = 1
_CHECKSUM = "sha256"  # key of the checksum of all other keys


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
        content = {**asdict(self), "files": {name: list(record) for name, record in self.files.items()}}
        write_synced(folder / NAME, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """CheckpointError if the folder is not a checkpoint that this program reads."""
        path = folder / NAME
        try:
            content: dict[str, Any] = read_json(path)
            version = content["version"]
            if version != VERSION:
                raise CheckpointError(
                    f"checkpoint {folder} has format {short(version)}; this program reads format {VERSION}"
                )
            wanted = content.pop(_CHECKSUM, None)
            if wanted is not None and wanted != _checksum(content):
                raise CheckpointError(f"checkpoint {folder}: {NAME} was changed after it was written")
            _check_content(content)
            content["files"] = {name: FileRecord(*record) for name, record in content["files"].items()}
            return cls(**content)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {folder} has no {NAME}: its saving was never finished") from None
        except JsonError as error:
            raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged, it {error}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = short(f"{type(error).__name__}: {error}", 200)
            raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged ({reason})") from None

    def damage(self, folder: Path, *, part: int = 0, parts: int = 1, contents: bool = True) -> str | None:
        """What is wrong with the files, or None. Ranks can share the work: each checks `part` of `parts`."""
        inside = folder.resolve()
        for name in sorted(self.files)[part::parts]:
            wanted = self.files[name]
            try:
                if not (folder / name).resolve().is_relative_to(inside):
                    return f"{name} is a link that leads out of the folder"
                if not (folder / name).is_file():
                    return f"{name} is missing" if not (folder / name).exists() else f"{name} is no file"
                size = (folder / name).stat().st_size
                if size != wanted.size:
                    return f"{name} has {size} bytes instead of {wanted.size}"
                if contents and checksum(folder / name) != wanted:
                    return f"{name} has another checksum than when it was written"
            except FileNotFoundError:
                return f"{name} is missing"
            except (OSError, RuntimeError) as error:  # a link that leads to itself is a RuntimeError
                return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
        return None


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_content(content: dict[str, Any]) -> None:
    """ValueError if a value is not what `write` writes. File names must stay in the folder."""
    needed = {f.name for f in fields(Manifest)} - {"aliases"}
    if not needed <= content.keys() <= {*needed, "aliases"}:
        raise ValueError(f"it lacks or has more than {', '.join(sorted(needed))}")
    for key, least, most in (("step", 0, 2**62), ("world", 1, 1 << 20), ("stage", 0, 3)):
        if type(content[key]) is not int or not least <= content[key] <= most:
            raise ValueError(f"{key} is {short(content[key])}")
    if not isinstance(content["layout"], str) or not isinstance(content["precision"], str):
        raise ValueError("layout and precision must be names")
    for name, shape in content["parameters"].items():
        if not isinstance(shape, list) or any(type(side) is not int or side < 0 for side in shape):
            raise ValueError(f"the shape of {short(name)} is {short(shape)}")
        _check_inside(name)  # a universal folder has a folder of each parameter's name
    if not content["parameters"]:
        raise ValueError("it lists no parameters")
    for alias, name in content.get("aliases", {}).items():
        if not isinstance(name, str):
            raise ValueError(f"{short(alias)} is another name of {short(name)}")
    for name, record in content["files"].items():
        _check_inside(name)
        if not isinstance(record, list) or len(record) != 2 or any(type(n) is not int or n < 0 for n in record):
            raise ValueError(f"the size and checksum of {short(name)} are {short(record)}")


def _check_inside(name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name:
        raise ValueError(f"the name {short(name)} leads out of the folder")
