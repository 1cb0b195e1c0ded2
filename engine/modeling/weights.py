"""Read plain weight files: .pth and .safetensors of a detector or a backbone, always without pickled code."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn

from engine.errors import UserError, first_line, first_of
from engine.plain_json import JsonError, parse_json
from engine.zero.archives import ArchiveError, check_archive, check_tensors
from engine.zero.scalars import file_shape
from engine.zero.whole_parameters import copy_into

META_KEY = "gigadet"  # key of `meta` (as JSON) in the metadata of a .safetensors file


class WeightsError(UserError):
    """A weight file cannot be read or does not fit."""


class LoadReport(NamedTuple):
    path: str
    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    dropped: list[str]

    def __str__(self) -> str:
        def some(names: list[str]) -> str:
            return f" ({first_of(names, 3)})" if names else ""

        text = (
            f"{self.path}: {len(self.matched)} tensors matched, {len(self.missing)} of the model not in the file"
            f"{some(self.missing)}, {len(self.unexpected)} of the file not in the model{some(self.unexpected)}"
        )
        if self.dropped:
            text += f", {len(self.dropped)} of another shape left out{some(self.dropped)}"
        return text


class Stored(NamedTuple):
    """A tensor that is read from disk when it is needed."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def whole(value: torch.Tensor | Stored) -> torch.Tensor:
    return value.read() if isinstance(value, Stored) else value


def read_file(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict of a file (also if it is inside another dictionary) and its `meta`."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise WeightsError(f"weight file {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                content: Any = {
                    "state_dict": {name: file.get_tensor(name) for name in list(file.keys())},
                    "meta": parse_json((file.metadata() or {}).get(META_KEY, "{}")),
                }
        else:
            check_archive(path)
            # Only zip archives can be mapped into memory; files from before torch 1.6 are none.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        check_tensors(content)
    except ArchiveError as error:
        raise WeightsError(f"weight file {path} {error}") from None
    except JsonError as error:
        raise WeightsError(f"weight file {path}: its metadata {error}") from None
    except Exception as error:  # readers raise errors of many types
        raise WeightsError(
            f"weight file {path} cannot be read as plain tensors ({type(error).__name__}: {first_line(error)})"
        ) from None
    meta = content.get("meta", {}) if isinstance(content, Mapping) else {}
    for key in ("state_dict", "model", "module"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = (
        {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise WeightsError(f"weight file {path} holds no named tensors")
    meta = meta if isinstance(meta, dict) else {}
    return {key.removeprefix("module."): value for key, value in tensors.items()}, meta


def _as_named_here(tensors: Mapping[str, Any], model_names: set[str]) -> Mapping[str, Any]:
    """The file's tensors under the model's names: unchanged, or as those of the backbone (mmdet's or timm's).

    timm's feature extractors rename parts of a sequence (`stages.0.` becomes `stages_0.`), and some models are wrapped
    once more (`model.`). Our classifiers already have timm's names below `backbone.`.
    """
    bare = {name.removeprefix("backbone."): value for name, value in tensors.items()}
    flat = {re.sub(r"^(\w+)\.(\d+)\.", r"\1_\2.", name): value for name, value in bare.items()}
    candidates = [
        {prefix + name: value for name, value in named.items()}
        for prefix, named in (
            ("", tensors),
            ("backbone.", tensors),
            ("backbone.body.", bare),
            ("backbone.body.", flat),
            ("backbone.body.model.", bare),
        )
    ]
    return max(candidates, key=lambda named: len(named.keys() & model_names))  # the first of equal ones


def fit_weights(model: nn.Module, tensors: Mapping[str, Any], path: str, *, drop_mismatched: bool) -> LoadReport:
    """Copy tensors that fit by name and shape into the model, which may be partitioned; report the others."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = {name: parameters.get(name, value) for name, value in model.state_dict(keep_vars=True).items()}
    tensors = _as_named_here(tensors, set(targets))
    matched: list[str] = []
    dropped: list[str] = []
    for name in targets.keys() & tensors.keys():
        fits = file_shape(targets[name]) == tuple(tensors[name].shape)
        (matched if fits else dropped).append(name)
    if not matched:
        raise WeightsError(
            f"weight file {path} has no tensor that fits this detector: its names begin like "
            f'"{next(iter(tensors))}", the detector\'s like "{next(iter(targets))}"'
        )
    if dropped and not drop_mismatched:
        name = sorted(dropped)[0]
        raise WeightsError(
            f"weight file {path} does not fit: {name} is {tuple(tensors[name].shape)} in the file and "
            f"{file_shape(targets[name])} here (another number of classes?); set detector.drop_mismatched to true to "
            "train such layers anew"
        )
    for name in sorted(matched):
        copy_into(targets[name], whole(tensors[name]))
    return LoadReport(
        str(path),
        sorted(matched),
        sorted(targets.keys() - tensors.keys()),
        sorted(tensors.keys() - targets.keys()),
        sorted(dropped),
    )
