"""Build a detector from a zoo name, `mmdet::...` or a path, with options and class count. Nothing is downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, nearest
from engine.modeling.adapting import adapt, check_packages, drop_downloads, missing_package
from engine.modeling.weights import fit_weights, read_file
from engine.zero.scalars import whole_shape
from models.mmdet_setup import import_mmdet, quiet
from models.zoo import zoo_configs

TEACHER = "teacher_ckpt"  # the option of a distilled detector that names the file of its teacher's weights


def config_path(name: str) -> Path:
    if name.startswith("mmdet::"):
        import mmdet  # here: it takes seconds

        folder = Path(mmdet.__file__).parent / ".mim" / "configs"
        path = folder / name[len("mmdet::") :]
        if path.is_file():
            return path
        known = [str(p.relative_to(folder)) for p in folder.glob("*/*.py")]
        raise ConfigError(f'mmdet has no config "{name}"{nearest(name[len("mmdet::") :], known)}')
    if name in zoo_configs():
        return zoo_configs()[name]
    if Path(name).expanduser().is_file():
        return Path(name).expanduser()
    known = list(zoo_configs())
    raise ConfigError(
        f'detector.config "{name}" is not a file, not in the zoo ({", ".join(known)}), and does not '
        f'begin with "mmdet::"{nearest(name, known)}'
    )


def read_model(name: str) -> Any:
    """The `model` of an mmdet config as it stands in its file."""
    import_mmdet()
    from mmengine.config import Config  # here: import_mmdet comes first and takes seconds

    path = config_path(name)
    try:
        full = Config.fromfile(str(path))
    except ImportError as error:  # a config may import what registers its parts
        package = re.search(r"(?:'imports': \[|No module named )'(\w+)", str(error))
        if package is None:
            raise ConfigError(f"mmdet config {path} cannot be read ({first_line(error)})") from None
        raise ConfigError(missing_package(name, "its config", package[1])) from None
    except Exception as error:  # a config is Python and may raise anything
        raise ConfigError(f"mmdet config {path} cannot be read ({type(error).__name__}: {error})") from None
    if "model" not in full:
        raise ConfigError(f"mmdet config {path} defines no `model`")
    return Config(dict(model=full.model)).model


def dropped_weights(config: DetectorConfig) -> list[str]:
    """What the mmdet config would have downloaded and no file replaces, as `place: source`."""
    dropped = drop_downloads(read_model(config.config))
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

    full = Config(dict(model=read_model(config.config)))
    adapt(full.model, classes, config.config, _read_teacher)
    options = {key: value for key, value in config.options.items() if key != TEACHER}
    try:
        full.merge_from_dict({f"model.{key}": value for key, value in options.items()})
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"detector.options do not fit the model ({error})") from None
    downloads = drop_downloads(full.model)
    if downloads:
        raise ConfigError(
            f"detector.options would load weights ({downloads[0]}): give the file as detector.load_from instead"
        )
    try:
        apply_ablations(full.model, **config.ablation.model_dump())
    except ValueError as error:
        raise ConfigError(f"detector.ablation.{error}") from None
    check_packages(full.model, config.config)
    return full.model


def _read_teacher(path: str) -> Any:
    """mmdet names teachers by their place in its repository, `configs/gfl/...`."""
    return read_model(path if Path(path).is_file() else f"mmdet::{path.removeprefix('configs/')}")


def build_detector(config: DetectorConfig, classes: Classes) -> nn.Module:
    """The detector on the CPU (or where `deepspeed.zero.Init` puts it), without initialised weights."""
    from mmdet.registry import MODELS  # here: importing mmdet takes seconds

    dictionary = model_config(config, classes)
    try:
        with quiet():
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

    return MODELS.build(model_config(config, classes).get("data_preprocessor", dict(type="DetDataPreprocessor")))


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
