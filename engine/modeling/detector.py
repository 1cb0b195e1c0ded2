"""Build a detector from a zoo name, `mmdet::...` or a path, with options and class count. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from engine.config.origin import TRUST, Origin
from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, nearest, short
from engine.zero.scalars import whole_shape
from models.carried_names import refusals
from models.mmdet_setup import import_mmdet, quiet
from models.registry_gate import import_paths_allowed
from models.zoo import zoo_configs


def config_path(name: str, origin: Origin) -> Path:
    """The file of a detector. Only a config that the user wrote may name one outside the zoo and mmdet."""
    if name.startswith("mmdet::"):
        return _mmdet_file(name[len("mmdet::") :])
    if name in zoo_configs():
        return zoo_configs()[name]
    if origin is Origin.USER and _is_file(name):
        return Path(name).expanduser()
    known = list(zoo_configs())
    raise ConfigError(
        f'detector.config "{short(name, 200)}" is not a file, not in the zoo ({", ".join(known)}), and does not '
        f'begin with "mmdet::"{nearest(name, known)}'
        + ("" if origin is Origin.USER else "; a config that a file carries may name no file")
    )


def _mmdet_file(name: str) -> Path:
    import mmdet  # here: it takes seconds

    folder = (Path(mmdet.__file__).parent / ".mim" / "configs").resolve()
    known = {str(path.relative_to(folder)): path for path in folder.glob("*/*.py")}
    if name not in known:  # not by joining paths, which would lead out of the folder with ".."
        raise ConfigError(f'mmdet has no config "mmdet::{short(name)}"{nearest(name, known)}')
    return known[name]


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError):  # a name that is too long, the home of an unknown user
        return False


def model_config(config: DetectorConfig, classes: Classes) -> Any:
    """The mmdet model dictionary that will be built."""
    import_mmdet()
    # Here, because import_mmdet comes first and takes seconds.
    from mmengine.config import Config

    from models.ablations.apply import apply_ablations

    trusted = config.origin is Origin.USER
    path = config_path(config.config, config.origin)
    try:
        full = Config.fromfile(str(path), import_custom_modules=trusted)
    except Exception as error:  # a config is Python and may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"mmdet config {path} cannot be read ({reason})") from None
    if not isinstance(full.get("model"), dict):
        raise ConfigError(f"mmdet config {path} defines no `model`")
    full = Config(dict(model=full.model))
    _drop_downloads(full.model)
    _size_heads(full.model, classes)
    _merge_options(full, config.options)
    for place in _weight_files(full.model, "detector.options"):
        raise ConfigError(
            f"{short(place)} would load weights by itself: remove it and name the file in detector.load_from "
            "(nothing is downloaded)"
        )
    if not trusted:
        for problem in refusals(full.model, "detector.options"):
            raise ConfigError(f"the carried config is refused: {problem}; {TRUST}")
    try:
        apply_ablations(full.model, **config.ablation.model_dump())
    except ValueError as error:
        raise ConfigError(f"detector.ablation.{error}") from None
    return full.model


def _merge_options(full: Any, options: dict[str, Any]) -> None:
    for key in options:
        if not all(key.split(".")):
            raise ConfigError(f'detector.options: "{short(key)}" is no dotted key of the model, such as backbone.depth')
    before = copy.deepcopy(full)
    try:
        full.merge_from_dict({f"model.{key}": value for key, value in options.items()})
    except Exception as error:  # mmengine raises errors of many types for a path that does not exist
        culprit = next((f'"{short(key)}" does' for key in options if not _merges(before, key, options[key])), "they do")
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"detector.options: {culprit} not fit the model ({reason})") from None
    if not isinstance(full.model, dict):
        raise ConfigError("detector.options leave no model")


def _merges(full: Any, key: str, value: Any) -> bool:
    try:
        copy.deepcopy(full).merge_from_dict({f"model.{key}": value})
    except Exception:  # as above
        return False
    return True


def _weight_files(node: Any, where: str) -> Iterator[str]:
    """Where a model would load weights from a file or a server while it is built or initialised."""
    if isinstance(node, dict):
        for key, value in node.items():
            place = f"{where}.{key}"
            if key == "init_cfg":
                parts = value if isinstance(value, (list, tuple)) else [value]
                if any(isinstance(p, dict) and (p.get("type") == "Pretrained" or "checkpoint" in p) for p in parts):
                    yield place
            elif (key == "pretrained" and isinstance(value, str)) or (key == "teacher_ckpt" and value):
                yield place
            yield from _weight_files(value, place)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _weight_files(value, f"{where}[{number}]")


def _walk(node: Any) -> Iterator[dict]:
    if isinstance(node, dict):
        yield node
        for value in list(node.values()):
            yield from _walk(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _walk(value)


def _drop_downloads(model: Any) -> None:
    """Remove mmdet's entries that download pre-trained weights on every rank. Weights come from the user's file."""
    for node in _walk(model):
        init = node.get("init_cfg")
        if isinstance(init, dict) and (init.get("type") == "Pretrained" or "checkpoint" in init):
            node["init_cfg"] = None
        for key in ("pretrained", "teacher_ckpt"):
            if isinstance(node.get(key), str):
                node[key] = None


def _size_heads(model: Any, classes: Classes) -> None:
    for node in _walk(model):
        if "num_classes" in node and node.get("type") != "FusedSemanticHead":
            node["num_classes"] = len(classes.things)
        if "num_things_classes" in node:
            node["num_things_classes"] = len(classes.things)
            node["num_stuff_classes"] = len(classes.stuff)
            if "num_classes" in node:
                node["num_classes"] = len(classes.all)


def building(origin: Origin) -> contextlib.AbstractContextManager[None]:
    """Registries import what a config names only if the user wrote it."""
    return import_paths_allowed() if origin is Origin.USER else contextlib.nullcontext()


def build_detector(config: DetectorConfig, classes: Classes) -> nn.Module:
    """The detector on the CPU (or where `deepspeed.zero.Init` puts it), without initialised weights."""
    from mmdet.registry import MODELS  # here: importing mmdet takes seconds

    dictionary = model_config(config, classes)
    try:
        with quiet(), building(config.origin):
            model = MODELS.build(dictionary)
    except Exception as error:  # mmdet raises errors of many types; its message is what helps
        raise ConfigError(
            f'detector "{config.config}" cannot be built with these options ({first_line(error)})'
        ) from error
    for name, module in model.named_modules():
        count = getattr(module, "num_classes", None)
        if name.endswith("bbox_head") and count is not None and count != len(classes.things):
            raise ConfigError(
                f"{name} has {count} classes but the data has {len(classes.things)}: "
                "remove num_classes from detector.options"
            )
    for prefix in config.frozen:
        freeze(model, prefix)
    return model


def build_preprocessor(config: DetectorConfig, classes: Classes) -> nn.Module:
    from mmdet.registry import MODELS  # here: importing mmdet takes seconds

    dictionary = model_config(config, classes).get("data_preprocessor") or dict(type="DetDataPreprocessor")
    try:
        with building(config.origin):
            return MODELS.build(dictionary)
    except Exception as error:  # as above
        raise ConfigError(f"the detector's data_preprocessor cannot be built ({first_line(error)})") from error


def freeze(model: nn.Module, prefix: str) -> None:
    frozen = [p for name, p in model.named_parameters() if name == prefix or name.startswith(prefix.rstrip(".") + ".")]
    if not frozen:
        children = [name for name, _ in model.named_modules() if name]
        raise ConfigError(f'detector.frozen: no parameter begins with "{prefix}"{nearest(prefix, children)}')
    for parameter in frozen:
        parameter.requires_grad_(False)


def describe(model: nn.Module) -> str:
    counts = [(whole_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(n for n, _ in counts), sum(n for n, t in counts if t)
    return f"{type(model).__name__}, {total / 1e6:.2f}M parameters, {trained / 1e6:.2f}M trained"
