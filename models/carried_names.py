"""What a config that nobody vouches for may name: registered classes, from a closed list of registries.

Being registered is not enough: some classes of mmdet read files, run programs or evaluate text that a config gives.
They are listed in `REFUSED`. tests/models/test_carried_names.py looks for more in the source of all registered ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from models.registry_gate import is_registered_form

REFUSED = {
    "Albu": "it calls any function of albumentations",
    "AppearanceFreeLink": "it loads a file",
    "BertModel": "it loads files of a model by name",
    "CameraMotionCompensation": "it evaluates text",
    "Detectron2Wrapper": "it loads files with another library",
    "KnowledgeDistillationSingleStageDetector": "it reads a Python file",
    "LAD": "it loads a file",
    "LoadMultiChannelImageFromFiles": "it reads files",
    "Pretrained": "it loads a file: weights come from detector.load_from",
    "RandomSamplingNegPos": "it reads files",
}
# Values of `type` that are looked up elsewhere than in a registry: NMS, RoI layers, transitions of the neck FPG.
OPERATORS = {"nms", "soft_nms", "RoIAlign", "RoIPool", "SimpleRoIAlign", "conv", "interpolation_conv", "last_conv"}


@functools.cache
def registries() -> tuple[Any, ...]:
    """The closed list: what models, their parts, transforms and initial weights are built from."""
    from mmdet.registry import MODELS, TASK_UTILS, TRANSFORMS
    from mmengine.registry import MODELS as ENGINE_MODELS
    from mmengine.registry import TRANSFORMS as ENGINE_TRANSFORMS
    from mmengine.registry import WEIGHT_INITIALIZERS

    return (MODELS, TASK_UTILS, TRANSFORMS, ENGINE_MODELS, ENGINE_TRANSFORMS, WEIGHT_INITIALIZERS)


def known_names() -> set[str]:
    return {name for registry in registries() for name in registry.module_dict} | OPERATORS


def refusals(node: Any, where: str) -> Iterator[str]:
    """Each `type` in a part of a config that may not be named, with the reason."""
    yield from _refusals(node, where, known_names())


def _refusals(node: Any, where: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, Mapping):
        if "type" in node:
            reason = _reason(node["type"], known)
            if reason:
                yield f"{where}.type is {node['type']!r:.80}, {reason}"
        for key, value in node.items():
            yield from _refusals(value, f"{where}.{key}", known)
    elif isinstance(node, (list, tuple)):
        for place, value in enumerate(node):
            yield from _refusals(value, f"{where}[{place}]", known)
    elif node is not None and not isinstance(node, (str, int, float)):
        yield f"{where} is a {type(node).__name__} and not a plain value"


def _reason(kind: Any, known: set[str]) -> str | None:
    if not isinstance(kind, str):
        return "which is not text"
    name = kind.rpartition(".")[2]
    if not is_registered_form(kind) or name not in known:
        return "which is not the name of a registered class"
    return f"which is refused in a config that a file carries: {REFUSED[name]}" if name in REFUSED else None
