"""Param groups of a run: one per (module, weight decay, learning-rate factor). ZeRO is slow with many groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from engine.config.schema import ParamwiseConfig
from engine.errors import ConfigError, nearest
from engine.modeling.blocks import block_name
from engine.optim.modules import covers, detector_modules, module_of
from engine.zero.scalars import whole_shape

# Swin's position tables (mmdet's and timm's names): like norms, its authors give them no weight decay.
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
    """Groups with `module`, `weight_decay`, `lr`, and `base_lr`, which the schedule multiplies with its factor."""
    modules = modules or detector_modules(model)
    _check_prefixes(paramwise.lr_mult, model)
    layers = _backbone_layers(model) if paramwise.layer_decay is not None else {}
    depth = max(layers.values(), default=0) + 1
    groups: dict[tuple[str, float, float], dict[str, Any]] = {}
    for name, parameter, owner in _named_with_owner(model):
        if not parameter.requires_grad:
            continue
        try:
            module = module_of(name, modules)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        is_bias = name.endswith("bias")
        is_scale = len(whole_shape(parameter)) <= 1 and not is_bias  # LayerScale, a temperature, a custom norm's weight
        if isinstance(owner, _NORMS) or is_scale or name.endswith(_POSITIONS):
            decays = paramwise.norm_decay
        else:
            decays = paramwise.bias_decay or not is_bias
        factor = max(((len(p), f) for p, f in paramwise.lr_mult.items() if covers(p, name)), default=(0, 1.0))[1]
        if paramwise.layer_decay is not None and name in layers:
            factor *= paramwise.layer_decay ** (depth - layers[name])
        decay = weight_decay if decays else 0.0
        group = groups.setdefault(
            (module, decay, factor),
            {"params": [], "module": module, "weight_decay": decay, "lr": lr * factor, "base_lr": lr * factor},
        )
        group["params"].append(parameter)
    if not groups:
        raise ConfigError("every parameter is frozen: nothing to train")
    return list(groups.values())


def _named_with_owner(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a shared parameter belongs to the first module that has it
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter, module


def _check_prefixes(lr_mult: Mapping[str, float], model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    for prefix in lr_mult:
        if not any(covers(prefix, name) for name in names):
            known = {name for name, _ in model.named_modules() if name}
            raise ConfigError(
                f'optimizer.paramwise.lr_mult: no parameter begins with "{prefix}"{nearest(prefix, known)}'
            )


def _backbone_layers(model: nn.Module) -> dict[str, int]:
    """Layer number of each backbone parameter: 0 for the stem, then the blocks in the order of their definition.

    A block is a name with a stage number and a block number (`layer3.1`, `stages.2.blocks.5`). A parameter in no block,
    such as a norm after a stage, belongs to the block before it.
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
