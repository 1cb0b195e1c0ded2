"""Param groups of a run: one per (module, weight decay, learning-rate factor), as few as ZeRO likes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from engine.config.schema import ParamwiseConfig
from engine.errors import ConfigError, nearest
from engine.modeling.blocks import block_name
from engine.optim.modules import detector_modules
from engine.zero.scalars import whole_shape

# Swin's tables of positions, which its authors leave without decay as they do norms (mmdet's and timm's names).
_POSITIONS = ("relative_position_bias_table", "absolute_pos_embed")
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(
    model: nn.Module,
    paramwise: ParamwiseConfig,
    *,
    lr: float,
    weight_decay: float,
    modules: Mapping[str, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """Groups with `module`, `weight_decay`, `lr` and `base_lr`, which the schedule multiplies."""
    modules = modules or detector_modules(model)
    _check_prefixes(paramwise.lr_mult, model)
    layers = _backbone_layers(model) if paramwise.layer_decay is not None else {}
    depth = max(layers.values(), default=0) + 1
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for name, parameter, owner in _named_with_owner(model):
        if not parameter.requires_grad:
            continue
        homes = [m for m, prefixes in modules.items() if any(_below(name, prefix) for prefix in prefixes)]
        if len(homes) != 1:
            found = f"in modules {', '.join(homes)}" if homes else f"in none of the modules {', '.join(modules)}"
            raise ConfigError(
                f'parameter "{name}" is {found}: name its module, and only one, in optimizer.params.modules'
            )
        scale = len(whole_shape(parameter)) <= 1 and not name.endswith(
            "bias"
        )  # LayerScale, a temperature, a class's own norm
        decays = (
            paramwise.norm_decay
            if isinstance(owner, _NORMS) or scale or name.endswith(_POSITIONS)
            else paramwise.bias_decay
            if name.endswith("bias")
            else True
        )
        factor = max(((len(p), f) for p, f in paramwise.lr_mult.items() if _below(name, p)), default=(0, 1.0))[1]
        if name in layers:
            factor *= paramwise.layer_decay ** (depth - layers[name])
        decay = weight_decay if decays else 0.0
        group = groups.setdefault(
            (homes[0], decay, factor),
            {"params": [], "module": homes[0], "weight_decay": decay, "lr": lr * factor, "base_lr": lr * factor},
        )
        group["params"].append(parameter)
    if not groups:
        raise ConfigError("every parameter is frozen: nothing to train")
    return list(groups.values())


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")


def _named_with_owner(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a shared parameter belongs where it is first met
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, module


def _check_prefixes(lr_mult: Mapping[str, float], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    for prefix in lr_mult:
        if not any(_below(name, prefix) for name in names):
            known = {name for name, _ in model.named_modules() if name}
            raise ConfigError(
                f'optimizer.paramwise.lr_mult: no parameter begins with "{prefix}"{nearest(prefix, known)}'
            )


def _backbone_layers(model: nn.Module) -> dict[str, int]:
    """Layer number of each backbone parameter: 0 for the stem, then one for each block in the order of their making.

    A block is what the second number of a name counts (`layer3.1`, `stages.2.blocks.5`); a parameter without one, such
    as a norm behind a stage, belongs to the block before it.
    """
    layers: dict[str, int] = {}
    blocks: dict[str, int] = {}
    current = 0
    for name, _ in model.named_parameters():
        if not name.startswith("backbone."):
            continue
        block = block_name(name)
        if block is not None:
            current = blocks.setdefault(block, len(blocks) + 1)
        layers[name] = current
    if not blocks:
        raise ConfigError(
            "optimizer.paramwise.layer_decay: the backbone has no blocks that are numbered by stage and "
            "place, such as layer3.1, so its layers cannot be counted: use lr_mult"
        )
    return layers
