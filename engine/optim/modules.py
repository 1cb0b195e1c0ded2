"""Assign parameters to modules, and build param groups that name their module.

AGVM has one learning-rate factor per module (backbone, neck, RPN head, ...). A param group carries the name of its
module under `module`. There is one group per (module, weight decay): ZeRO is slow with many small groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from engine.zero.scalars import whole_shape

# The children of these count as modules: the paper's bbox head and mask head are inside `roi_head`.
CONTAINERS = ("roi_head",)


def detector_modules(model: nn.Module) -> dict[str, list[str]]:
    """The modules of an mmdet detector, found from its attributes: name -> prefixes of parameter names.

    Modules are the children that own parameters. `roi_head` is replaced by its own children (`bbox_head`, `mask_head`,
    `semantic_head`, ...), under their own names unless the detector has a child of the same name. A parameter directly
    on the detector forms a module named after it; parameters directly on `roi_head` form the module `roi_head`.
    """
    modules: dict[str, list[str]] = {}
    outer = {name for name, _ in model.named_children()}
    for name, child in model.named_children():
        inner = [part for part, _ in child.named_children()] if name in CONTAINERS else []
        for part in inner:
            if _owns_parameters(child.get_submodule(part)):
                modules[f"{name}.{part}" if part in outer else part] = [f"{name}.{part}"]
        loose = [f"{name}.{part}" for part, _ in child.named_parameters(recurse=False)]
        if not inner and _owns_parameters(child):
            modules[name] = [name]
        elif inner and loose:
            modules[name] = loose
    for name, _ in model.named_parameters(recurse=False):
        modules[name] = [name]
    return modules


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def module_groups(
    model: nn.Module,
    modules: Mapping[str, Sequence[str]] | None = None,
    *,
    weight_decay: float | None = None,
    no_decay: bool | Callable[[str, nn.Parameter], bool] = False,
) -> list[dict[str, Any]]:
    """Param groups of the trainable parameters, one per (module, weight decay).

    `modules` maps a name to prefixes of parameter names (`neck` covers `neck` and `neck.*`); by default
    `detector_modules` finds them. With `no_decay` True, parameters of at most one dimension (norms, biases) get weight
    decay 0; a predicate (name, parameter) chooses others. `weight_decay` is for the rest (default: the optimizer's).
    """
    modules = detector_modules(model) if modules is None else modules
    excluded = no_decay if callable(no_decay) else lambda name, parameter: no_decay and len(whole_shape(parameter)) <= 1
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for module in modules:
        for plain in (False, True):
            groups[module, plain] = {"params": [], "module": module}
            if plain:
                groups[module, plain]["weight_decay"] = 0.0
            elif weight_decay is not None:
                groups[module, plain]["weight_decay"] = weight_decay
    for name, parameter in model.named_parameters():
        module = module_of(name, modules)
        if parameter.requires_grad:
            groups[module, bool(excluded(name, parameter))]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def module_of(name: str, modules: Mapping[str, Sequence[str]]) -> str:
    """The module whose prefixes cover a parameter; ValueError if there is none, or more than one."""
    homes = [module for module, prefixes in modules.items() if any(covers(prefix, name) for prefix in prefixes)]
    if len(homes) == 1:
        return homes[0]
    found = f"modules {', '.join(homes)}" if homes else f"none of the modules {', '.join(modules)}"
    raise ValueError(
        f'parameter "{name}" is in {found}: list it under exactly one name in "modules" (optimizer.params.modules)'
    )


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")
