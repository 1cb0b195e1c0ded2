"""Build a detector from a zoo name, `mmdet::...` or a path, with options and class count. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, nearest
from engine.zero.scalars import whole_shape
from models.mmdet_setup import import_mmdet, quiet
from models.zoo import zoo_configs


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


def model_config(config: DetectorConfig, classes: Classes) -> Any:
    """The mmdet model dictionary that will be built."""
    import_mmdet()
    # Here, because import_mmdet comes first and takes seconds.
    from mmengine.config import Config

    from models.ablations.apply import apply_ablations

    path = config_path(config.config)
    try:
        full = Config.fromfile(str(path))
    except Exception as error:  # a config is Python and may raise anything
        raise ConfigError(f"mmdet config {path} cannot be read ({type(error).__name__}: {error})") from None
    if "model" not in full:
        raise ConfigError(f"mmdet config {path} defines no `model`")
    full = Config(dict(model=full.model))
    _drop_downloads(full.model)
    _size_heads(full.model, classes)
    try:
        full.merge_from_dict({f"model.{key}": value for key, value in config.options.items()})
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"detector.options do not fit the model ({error})") from None
    try:
        apply_ablations(full.model, **config.ablation.model_dump())
    except ValueError as error:
        raise ConfigError(f"detector.ablation.{error}") from None
    return full.model


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
        if isinstance(init, dict) and init.get("type") == "Pretrained":
            node["init_cfg"] = None
        if isinstance(node.get("pretrained"), str):
            node["pretrained"] = None


def _size_heads(model: Any, classes: Classes) -> None:
    for node in _walk(model):
        if "num_classes" in node and node.get("type") != "FusedSemanticHead":
            node["num_classes"] = len(classes.things)
        if "num_things_classes" in node:
            node["num_things_classes"] = len(classes.things)
            node["num_stuff_classes"] = len(classes.stuff)
            if "num_classes" in node:
                node["num_classes"] = len(classes.all)


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
