"""Which parameters belong to which module, and param groups that say so.

AGVM has one learning-rate factor per module (backbone, neck, RPN head, ...), and a param group carries its
module's name under `module`. There is one group per (module, weight decay): ZeRO is slow with many small groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from engine.zero.scalars import whole_shape

# A container whose children are modules of their own: the paper's bbox head and mask head sit inside `roi_head`.
CONTAINERS = ("roi_head",)


def detector_modules(model: nn.Module) -> dict[str, list[str]]:
    """Name -> parameter-name prefixes of an mmdet detector's modules, found from its attributes.

    These are the children that own parameters; `roi_head` is replaced by its own children (`bbox_head`,
    `mask_head`, `semantic_head`, ...), under their own names unless the detector has one of that name itself.
    Parameters directly on the detector or on `roi_head` form a module of their attribute's name.
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
    """Param groups, one per (module, weight decay), of the trainable parameters.

    `modules` maps a name to prefixes of parameter names (`neck` covers `neck` and `neck.*`); without it they are
    found by `detector_modules`. `no_decay` gives weight decay 0 to norms and biases (True: everything with at most
    one dimension) or to whatever a predicate (name, parameter) picks. `weight_decay` is that of the others; without
    it, the optimizer's. A frozen parameter is left out, and a group left empty is dropped.
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
        homes = [module for module, prefixes in modules.items() if any(_covers(p, name) for p in prefixes)]
        if len(homes) != 1:
            found = f"is in modules {homes}" if homes else f"is in none of the modules {list(modules)}"
            raise ValueError(f"parameter {name!r} {found}: name its module, and only one, under 'modules'")
        if parameter.requires_grad:
            groups[homes[0], bool(excluded(name, parameter))]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def _covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix + ".") or (prefix.endswith(".") and name.startswith(prefix))
