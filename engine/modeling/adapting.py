"""Fit mmdet's model dictionary to the data and to this engine: sizes of heads, padding, and no downloads.

mmdet's configs are written for COCO, for mmdet's own pipelines and for a machine that downloads weights. What must be
different here is kept as data at the top of this file.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.data.types import Classes
from engine.errors import ConfigError

# Parts that join maps of neighbouring strides and so need sides that are multiples of this. Their configs pad images in
# mmdet's pipelines, which are not used here.
_PADDED_TO = {"CSPNeXtPAFPN": 32, "YOLOXPAFPN": 32, "YOLOV3Neck": 32, "HourglassNet": 128}
# Heads whose classes are those of pixels: every class of objects, and the background.
_PIXEL_HEADS = ("FusedSemanticHead", "SCNetSemanticHead")
# Heads that tell objects from background whatever their class: mmdet writes two columns of scores into CrowdDet's loss.
_ONE_CLASS = ("MultiInstanceBBoxHead",)
# Parts that need a package of their own: what is imported, and what is installed.
_PACKAGES = {
    "PAAHead": ("sklearn", "scikit-learn"),
    "LADHead": ("sklearn", "scikit-learn"),
    "BertModel": ("transformers", "transformers"),
    "Detectron2Wrapper": ("detectron2", "detectron2"),
}
# mmdet's batch augmentations and ours in their place. The first draws with the state of one rank. The others bring a
# batch to the fixed size of mmdet's own pipeline, 1024 pixels and more; images here are as large as `data.scale` says.
_AUGMENTS = {"BatchSyncRandomResize": "StepRandomResize", "BatchFixedSizePad": None, "BatchResize": None}

Read = Callable[[str], Any]


def adapt(model: Any, classes: Classes, name: str, read: Read) -> None:
    """Change a model dictionary in place. `read` gives the model dictionary of another mmdet config, for a teacher."""
    refuse_other_data(model, name)
    drop_downloads(model)
    _size_heads(model, classes)
    _pad(model)
    _replace_augments(model.get("data_preprocessor") or {})
    if isinstance(model.get("teacher_config"), (str, Path)):
        teacher = read(str(model["teacher_config"]))
        adapt(teacher, classes, str(model["teacher_config"]), read)
        model["teacher_config"] = dict(model=teacher)


def _replace_augments(preprocessor: Any) -> None:
    kept = []
    for augment in preprocessor.get("batch_augments") or []:
        kind = _AUGMENTS.get(augment["type"], augment["type"])
        if kind is not None:
            kept.append({**augment, "type": kind})
    if "batch_augments" in preprocessor:
        preprocessor["batch_augments"] = kept or None


def refuse_other_data(model: Any, name: str) -> None:
    """Refuse a model that learns from something else than an image and its objects."""
    kind = str(model.get("type"))
    if "language_model" in model:
        raise ConfigError(
            f'detector "{name}" ({kind}) is trained with a text for every image, and data sets here have none: '
            "use a detector without language_model"
        )
    if kind == "FastRCNN":
        raise ConfigError(
            f'detector "{name}" (FastRCNN) takes proposals from a file, and data sets here have none: '
            'use one that finds its own, such as "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"'
        )
    check_packages(model, name)
    if "detector" in model and "backbone" not in model:
        raise ConfigError(
            f'detector "{name}" ({kind}) is trained with videos or with images that have no annotations: '
            "use the detector inside it"
        )


def check_packages(model: Any, name: str) -> None:
    """Name the package that a part of the model needs and that is not installed."""
    for node in _dictionaries(model):
        kind = str(node.get("type"))
        module, package = _PACKAGES.get(kind, (kind.split(".")[0], kind.split(".")[0]) if "." in kind else ("", ""))
        if node.get("num_cp", -1) > 0:  # recomputed layers of a transformer's encoder
            kind, module, package = f"{kind} with num_cp", "fairscale", "fairscale"
        if module and importlib.util.find_spec(module) is None:
            raise ConfigError(missing_package(name, kind, package))


def missing_package(name: str, part: str, package: str) -> str:
    return (
        f'detector "{name}" needs the package {package} (for {part}), which is not installed: pip install {package}, '
        "or use another detector"
    )


def _dictionaries(node: Any) -> Iterator[dict]:
    return (found for _, found in _named(node, ""))


def _named(node: Any, path: str) -> Iterator[tuple[str, dict]]:
    """Every dictionary in the model, with the dotted path to it."""
    if isinstance(node, dict):
        yield path, node
        for key, value in list(node.items()):
            yield from _named(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, (list, tuple)):
        for place, value in enumerate(node):
            yield from _named(value, f"{path}.{place}" if path else str(place))


def drop_downloads(model: Any) -> list[str]:
    """Remove mmdet's entries that download weights on every rank; returns `place: source` of each.

    Weights come from the user's file (`detector.load_from`).
    """
    dropped: list[str] = []
    for path, node in _named(model, ""):
        where = path or "detector"
        init = node.get("init_cfg")
        entries = init if isinstance(init, (list, tuple)) else [init]
        downloads = [entry for entry in entries if isinstance(entry, dict) and "checkpoint" in entry]
        if downloads:
            dropped += [f"{where}: {entry['checkpoint']}" for entry in downloads]
            node["init_cfg"] = [entry for entry in entries if entry not in downloads]
            if not node["init_cfg"]:
                del node["init_cfg"]
        if isinstance(node.get("pretrained"), str):
            dropped.append(f"{where}: {node['pretrained']}")
            del node["pretrained"]
        if isinstance(node.get("teacher_ckpt"), str):
            dropped.append(f"teacher: {node['teacher_ckpt']}")
            node["teacher_ckpt"] = None
    return dropped


def _size_heads(model: Any, classes: Classes) -> None:
    for path, node in _named(model, ""):
        if "num_classes" in node:
            before = node["num_classes"]
            one = node.get("type") in _ONE_CLASS
            node["num_classes"] = 1 if one else len(classes.things) + (node.get("type") in _PIXEL_HEADS)
            _size_weights(path, node, before, node["num_classes"])
        if "num_things_classes" in node:
            before = node["num_things_classes"] + node.get("num_stuff_classes", 0)
            node["num_things_classes"] = len(classes.things)
            node["num_stuff_classes"] = len(classes.stuff)
            if "num_classes" in node:
                node["num_classes"] = len(classes.all)
            _size_weights(path, node, before, len(classes.all))


def _size_weights(path: str, head: Any, before: int, count: int) -> None:
    """Class weights as a list: one for each class, and mostly one for the background behind them."""
    loss = head.get("loss_cls")
    weights = loss.get("class_weight") if isinstance(loss, dict) else None
    if not isinstance(weights, (list, tuple)) or before == count:
        return
    own, behind = list(weights[:before]), list(weights[before:])
    if len(set(own)) > 1:
        raise ConfigError(
            f"{path}.loss_cls.class_weight gives each of {before} classes its own weight, but the data has {count}: "
            f'set detector.options {{"{path}.loss_cls.class_weight": [...]}} for your classes'
        )
    loss["class_weight"] = own[:1] * count + behind


def _pad(model: Any) -> None:
    preprocessor = model.get("data_preprocessor")
    if preprocessor is None:
        return
    for node in _dictionaries(model):
        divisor = _PADDED_TO.get(str(node.get("type")))
        if divisor is not None:
            preprocessor["pad_size_divisor"] = math.lcm(preprocessor.get("pad_size_divisor", 1), divisor)
