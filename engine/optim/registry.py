"""All optimizers by name, and how one is built from the JSON's optimizer block.

A new optimizer is one file with a subclass of `Rule`, and one name in `OURS`. Whether it is modulated, how many sums it
needs and how much state it keeps is read from its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.config.schema import OptimizerConfig
from engine.errors import ConfigError, nearest, quoted, short
from engine.optim.agvm_adamw import AGVMAdamW
from engine.optim.agvm_layerwise import AGVMLAMB, AGVMLARS
from engine.optim.agvm_sgd import AGVMSGD
from engine.optim.lamb import LAMB, PMDLAMB
from engine.optim.lars import LARS
from engine.optim.param_groups import param_groups
from engine.optim.rule import Rule

OURS: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (AGVMAdamW, AGVMSGD, AGVMLAMB, AGVMLARS, LAMB, LARS, PMDLAMB)
}
LARGEST = 1e38  # about the largest number of 32 bits
# Under ZeRO an optimizer gets flat pieces of many parameters. These need whole matrices, sparse gradients or a closure.
_NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam", "Optimizer")


def find_rule(name: str) -> type[torch.optim.Optimizer]:
    """The class of an optimizer; ConfigError if there is none of this name that works on flat shards."""
    if name in OURS:
        return OURS[name]
    known = [
        n
        for n, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and n not in _NOT_ELEMENTWISE
    ]
    if name in known:
        return getattr(torch.optim, name)
    names = (*OURS, *sorted(known))
    if name in _NOT_ELEMENTWISE:
        raise ConfigError(f"optimizer {name} cannot work on ZeRO's flat shards: use one of {', '.join(names)}")
    raise ConfigError(f'optimizer.type "{name}" is none of {", ".join(names)}{nearest(name, names)}')


def is_modulated(name: str) -> bool:
    """Whether the optimizer is one of AGVM's."""
    return name in OURS and OURS[name].modulated


def sums_per_layer(name: str) -> int:
    """How many sums over each layer the optimizer needs before a step; 0 unless it is layer-wise."""
    return OURS[name].sums_per_layer if name in OURS else 0


def count_moments(config: OptimizerConfig) -> int:
    """How many tensors of a parameter's size the optimizer keeps, found by one step on a parameter of two numbers."""
    parameter = nn.Parameter(torch.zeros(2, device="cpu"))
    parameter.grad = torch.ones(2, device="cpu")
    model = nn.ParameterDict({"backbone": parameter})
    optimizer = build_optimizer(
        config.model_copy(
            update={"paramwise": type(config.paramwise).model_validate({}), "params": _without_modules(config.params)}
        ),
        model,
        warmup_steps=0,
    )
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state.values())


def _without_modules(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in ("modules", "anchor")}


def build_optimizer(config: OptimizerConfig, model: nn.Module, *, warmup_steps: int) -> torch.optim.Optimizer:
    options = dict(config.params)
    lr = options.get("lr")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 <= lr < float("inf"):
        raise ConfigError(f"optimizer.params.lr must be a number >= 0, got {quoted(lr)}")
    rule = find_rule(config.type)
    weight_decay = options.get("weight_decay", _default(rule, "weight_decay", 0.0))
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, (int, float)):
        raise ConfigError(f"optimizer.params.weight_decay must be a number, got {quoted(weight_decay)}")
    if options.get("differentiable"):
        raise ConfigError("optimizer.params.differentiable is refused: a run takes no gradient through its steps")
    modulated = is_modulated(config.type)
    modules = options.pop("modules", None) if modulated else None
    if modules is not None and not (isinstance(modules, dict) and all(isinstance(p, list) for p in modules.values())):
        raise ConfigError(
            "optimizer.params.modules must give each module's name a list of prefixes, such as "
            f'{{"neck": ["neck"]}}, got {quoted(modules)}'
        )
    groups = param_groups(model, config.paramwise, lr=lr, weight_decay=weight_decay, modules=modules)
    _check_range(options, "optimizer.params")
    for group in groups:
        _check_range({key: group.get(key) for key in ("lr", "weight_decay")}, "optimizer.paramwise")
    if modulated:
        options.pop("bucket_size", None)  # an argument of `attach`, not of the rule
        if options.setdefault("start_step", "warmup") == "warmup":
            options["start_step"] = warmup_steps
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return rule(groups, **options)
    except (IndexError, OverflowError, TypeError, ValueError) as error:  # torch indexes `betas` before it checks them
        raise ConfigError(f"optimizer {config.type} does not take these params ({error})") from None


def _check_range(values: Mapping[str, Any], where: str) -> None:
    """torch computes with 32 bits: it fails in the first step if a number does not fit."""
    for key, value in values.items():
        if isinstance(value, (int, float)) and abs(value) > LARGEST:
            raise ConfigError(f"{where}: {short(key)} {value:g} is beyond {LARGEST:g}, and torch computes with 32 bits")


def _default(rule: Any, option: str, otherwise: float) -> float:
    # A subclass may pass options on to its base class.
    found = [inspect.signature(kind.__init__).parameters.get(option) for kind in rule.__mro__]
    return next((p.default for p in found if p is not None and p.default is not inspect.Parameter.empty), otherwise)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the lr of every group to its base_lr times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
