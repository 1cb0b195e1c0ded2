"""Whether the parts of a detector fit each other: backbone and neck run once without data, on the meta device.

A neck that is made for other channels would fail in the first step, after the data has been read, with torch's words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.config.origin import Origin
from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, short
from engine.modeling.detector import building, model_config
from models.mmdet_setup import import_mmdet, quiet

SIDE = 128  # pixels: the smallest maps of a pyramid of stride 128 still have one
_ANY = Classes(("object",), (), (1,))


def check_parts(config: DetectorConfig) -> None:
    """ConfigError that names the two values that do not fit. Parts that cannot run without data are left alone."""
    import_mmdet()
    from mmdet.registry import MODELS  # here: import_mmdet comes first

    dictionary = model_config(config, _ANY)
    if not isinstance(dictionary.get("backbone"), dict) or not isinstance(dictionary.get("neck"), dict):
        return
    try:
        with quiet(), building(config.origin), torch.device("meta"):
            maps = _run(MODELS.build(dictionary.backbone), torch.empty(1, 3, SIDE, SIDE))
    except Exception:  # build_detector reports what cannot be built; kernels without a meta version are no fault
        return
    try:
        with quiet(), building(config.origin), torch.device("meta"):
            neck = MODELS.build(dictionary.neck)
    except Exception:  # as above
        return
    given, wanted = [map.shape[1] for map in maps], dictionary.neck.get("in_channels")
    try:
        maps = _run(neck, tuple(maps))
    except Exception as error:
        if _fits(given, wanted):  # another fault than the channels, or a kernel without a meta version
            return
        raise ConfigError(
            f"detector.options: neck.in_channels is {short(wanted)}, but the backbone ({_words(dictionary.backbone)}) "
            f"gives maps of {given} channels: change one of them ({first_line(error)})"
        ) from None
    for name in ("rpn_head", "bbox_head"):
        _check_head(dictionary, name, maps, config.origin)


def _check_head(dictionary: Any, name: str, maps: Any, origin: Origin) -> None:
    """A dense head on the neck's maps."""
    from mmdet.registry import MODELS  # here: import_mmdet comes first

    head = dictionary.get(name)
    if not isinstance(head, dict) or not isinstance(head.get("in_channels"), int):
        return
    given = sorted({map.shape[1] for map in maps if isinstance(map, torch.Tensor)})
    try:
        with quiet(), building(origin), torch.device("meta"):
            built = MODELS.build({**({"num_classes": 1} if name == "rpn_head" else {}), **head})
    except Exception:  # as above
        return
    try:
        _run(built, tuple(maps))
    except Exception as error:
        if given == [head["in_channels"]]:  # as above
            return
        raise ConfigError(
            f"detector.options: {name}.in_channels is {head['in_channels']}, but the neck ({dictionary.neck.type}, "
            f"out_channels {short(dictionary.neck.get('out_channels'))}) gives maps of {given} channels: change one of "
            f"them ({first_line(error)})"
        ) from None


@torch.no_grad()
def _run(module: nn.Module, inputs: Any) -> Any:
    module.eval()
    return module(inputs)


def _fits(given: list[int], wanted: Any) -> bool:
    if isinstance(wanted, int):
        return set(given) == {wanted}
    return not isinstance(wanted, (list, tuple)) or sorted(given) == sorted(wanted)  # some necks begin at the top


def _words(backbone: Any) -> str:
    """The settings of a backbone that decide its channels, as far as they are given."""
    names = ("depth", "arch", "model_name", "base_channels", "embed_dims", "num_stages", "out_indices")
    return ", ".join([str(backbone.type), *(f"{name} {short(backbone[name])}" for name in names if name in backbone)])
