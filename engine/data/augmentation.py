"""The transforms of `data.augmentation`, built. What is wrong with one is said before any image is read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.config.origin import TRUST, Origin
from engine.config.schema import DataConfig
from engine.errors import ConfigError, first_line, nearest, short
from models.carried_names import refusals, registries
from models.mmdet_setup import import_mmdet, quiet
from models.registry_gate import import_paths_allowed

VOID = 255  # label of pixels without a class


def build_augmentation(data: DataConfig) -> list[Any]:
    """The user's transforms in their order. A config that a file carries may name registered ones only."""
    if not data.augmentation:
        return []
    import_mmdet()
    # Here, because import_mmdet comes first and takes seconds.
    from mmdet.registry import TRANSFORMS

    TRANSFORMS.register_module(module=VariedCrop, force=True)
    if data.origin is not Origin.USER:
        for problem in refusals(data.augmentation, "data.augmentation"):
            raise ConfigError(f"the carried config is refused: {problem}; {TRUST}")
    allowed = import_paths_allowed() if data.origin is Origin.USER else contextlib.nullcontext()
    with allowed, quiet():
        return [_build(TRANSFORMS, step, f"data.augmentation[{place}]") for place, step in enumerate(data.augmentation)]


def _build(transforms: Any, step: dict[str, Any], where: str) -> Any:
    kind = step.get("type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(f'{where} must name a transform, such as {{"type": "RandomCrop", ...}}, got {short(step)}')
    if kind == "PackDetInputs":
        raise ConfigError(
            f"{where}: PackDetInputs is the last step of every pipeline and is added by itself: remove it"
        )
    try:
        return transforms.build(dict(step))
    except Exception as error:  # a transform may raise anything
        known = {name for registry in registries() if "transform" in registry.name for name in registry.module_dict}
        if kind not in known and "." not in kind:
            raise ConfigError(f'{where}: mmdet has no transform "{short(kind)}"{nearest(kind, known)}') from None
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f'{where}: the transform "{short(kind)}" cannot be built ({reason})') from None


class VariedCrop:
    """A random crop in which no class covers more than `max_share`, as mmseg crops ADE20K for training.

    Ten places are tried; the last one is used in any case. An image smaller than `size` (height, width) is not cropped.
    In a config: `"augmentation": [{"type": "VariedCrop", "size": [512, 512]}]`.
    """

    def __init__(self, size: Sequence[int], max_share: float = 0.75) -> None:
        self.size, self.max_share = size, max_share

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        labels = results["gt_seg_map"]
        for _ in range(10):
            # From numpy's generator, which the loader seeds for each sample.
            top, left = (np.random.randint(0, max(whole - part, 0) + 1) for whole, part in zip(labels.shape, self.size))
            place = np.s_[top : top + self.size[0], left : left + self.size[1]]
            counts = np.bincount(labels[place].ravel(), minlength=VOID + 1)[:VOID]
            if np.count_nonzero(counts) > 1 and counts.max() < self.max_share * counts.sum():
                break
        image = results["img"][place]
        return {**results, "img": image, "gt_seg_map": labels[place], "img_shape": image.shape[:2]}
