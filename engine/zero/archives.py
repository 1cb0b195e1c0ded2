"""What a file claims, compared with what it holds, before torch reads it: archives that unpack to more than they are,
tensors that are larger than their bytes.

A file of torch.save is a zip archive whose members are stored as they are. A small archive with compressed members can
fill all memory; a tensor with strides of zero needs no bytes at all, until it is copied.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_HARMLESS = 1 << 26  # bytes: an expanded tensor of less than this is let through


class ArchiveError(ValueError):
    """Its text goes on after the name of the file."""


def check_archive(path: Path) -> None:
    """ArchiveError if the file is a zip archive, but not one as torch.save writes it."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise ArchiveError(f"is a damaged zip archive ({error})") from None
    packed = [member for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ArchiveError(f"has a compressed member ({packed[0].filename[:80]}), which torch.save never writes")
    claimed, held = sum(member.file_size for member in members), path.stat().st_size
    if claimed > held:
        raise ArchiveError(f"claims {claimed} bytes in a file of {held}")


def check_tensors(content: Any) -> None:
    """ArchiveError if a tensor in nested dictionaries and lists is no plain one, or claims more than its bytes."""
    for tensor in _tensors(content, set()):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ArchiveError("holds a tensor that is sparse, quantised or without data")
        claimed = tensor.numel() * tensor.element_size()
        if claimed > max(tensor.untyped_storage().nbytes(), _HARMLESS):
            raise ArchiveError(f"holds a tensor of shape {tuple(tensor.shape)} that has fewer bytes")


def _tensors(root: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Without recursion, and each container once: a pickle can hold one that contains itself."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            yield node
        elif isinstance(node, (Mapping, list, tuple)) and not isinstance(node, torch.Size) and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(node.values() if isinstance(node, Mapping) else node)
