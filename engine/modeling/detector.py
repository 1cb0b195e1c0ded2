"""Build a detector from a zoo name, `mmdet::...` or a path, with options and class count. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from engine.config.origin import TRUST, Origin
from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, nearest, short
from engine.modeling.adapting import adapt, check_packages, drop_downloads, missing_package
from engine.modeling.weights import fit_weights, read_file
from engine.zero.scalars import whole_shape
from models.carried_names import refusals
from models.mmdet_setup import import_mmdet, quiet
from models.registry_gate import import_paths_allowed
from models.zoo import zoo_configs

TEACHER = "teacher_ckpt"  # the option of a distilled detector that names the file of its teacher's weights


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


def read_model(name: str, origin: Origin) -> Any:
    """The `model` of an mmdet config as it stands in its file."""
    import_mmdet()
    from mmengine.config import Config  # here: import_mmdet comes first and takes seconds

    path = config_path(name, origin)
    try:
        full = Config.fromfile(str(path), import_custom_modules=origin is Origin.USER)
    except ImportError as error:  # a config may import what registers its parts
        package = re.search(r"(?:'imports': \[|No module named )'(\w+)", str(error))
        if package is None:
            raise ConfigError(f"mmdet config {path} cannot be read ({first_line(error)})") from None
        raise ConfigError(missing_package(name, "its config", package[1])) from None
    except Exception as error:  # a config is Python and may raise anything
        raise ConfigError(f"mmdet config {path} cannot be read ({type(error).__name__}: {first_line(error)})") from None
    if not isinstance(full.get("model"), dict):
        raise ConfigError(f"mmdet config {path} defines no `model`")
    return Config(dict(model=full.model)).model


def dropped_weights(config: DetectorConfig) -> list[str]:
    """What the mmdet config would have downloaded and no file replaces, as `place: source`."""
    dropped = drop_downloads(read_model(config.config, config.origin))
    return [
        place
        for place in dropped
        if not (config.options.get(TEACHER) if place.startswith("teacher") else config.load_from)
    ]


def model_config(config: DetectorConfig, classes: Classes) -> Any:
    """The mmdet model dictionary that will be built."""
    import_mmdet()
    # Here, because import_mmdet comes first and takes seconds.
    from mmengine.config import Config

    from models.ablations.apply import apply_ablations

    full = Config(dict(model=read_model(config.config, config.origin)))
    adapt(full.model, classes, config.config, lambda name: _read_teacher(name, config.origin))
    _merge_options(full, {key: value for key, value in config.options.items() if key != TEACHER})
    for place in _weight_files(full.model, "detector.options"):
        raise ConfigError(
            f"{short(place)} would load weights by itself: remove it and name the file in detector.load_from "
            "(nothing is downloaded)"
        )
    if config.origin is not Origin.USER:
        for problem in refusals(full.model, "detector.options"):
            raise ConfigError(f"the carried config is refused: {problem}; {TRUST}")
    try:
        apply_ablations(full.model, **config.ablation.model_dump())
    except ValueError as error:
        raise ConfigError(f"detector.ablation.{error}") from None
    check_packages(full.model, config.config)
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


def _read_teacher(path: str, origin: Origin) -> Any:
    """mmdet names teachers by their place in its repository, `configs/gfl/...`."""
    own = origin is Origin.USER and _is_file(path)
    return read_model(path if own else f"mmdet::{path.removeprefix('configs/')}", origin)


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
        if name.endswith("bbox_head") and count not in (None, len(classes.things)) and not one_class(model):
            raise ConfigError(
                f"{name} has {count} classes but the data has {len(classes.things)}: "
                "remove num_classes from detector.options"
            )
    if config.options.get(TEACHER):
        teacher = str(config.options[TEACHER])
        fit_weights(model.teacher_model, read_file(teacher)[0], teacher, drop_mismatched=False)
    _register_aliases(model)
    _limit_outputs(model, len(classes.things))
    for prefix in config.frozen:
        freeze(model, prefix)
    return model


def _limit_outputs(model: Any, things: int) -> None:
    """DETRs and MaskFormers return the best of (query, class), and mmdet (3.5.1) asks for more of them than there are
    where queries and classes are few."""
    queries = getattr(getattr(model, "panoptic_head", model), "num_queries", None)
    for head in (getattr(model, "bbox_head", None), getattr(model, "panoptic_fusion_head", None)):
        settings = getattr(head, "test_cfg", None)
        for key in ("max_per_img", "max_per_image"):
            if isinstance(queries, int) and settings is not None and key in settings:
                settings[key] = min(settings[key], queries * things)


def _register_aliases(model: Any) -> None:
    """DDQ's decoder gets branches of the head under a second name, in mmdet (3.5.1) not before the first training step.
    Names in files and in copies of the model must not depend on that."""
    branches = getattr(getattr(model, "bbox_head", None), "aux_reg_branches", None)
    if branches is not None:
        model.decoder.aux_reg_branches = branches


def one_class(model: nn.Module) -> bool:
    """Whether the detector finds objects but not their classes: mmdet's RPN on its own, and CrowdDet."""
    head = getattr(getattr(model, "roi_head", None), "bbox_head", None)
    return type(model).__name__ == "RPN" or type(head).__name__ == "MultiInstanceBBoxHead"


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
