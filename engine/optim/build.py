"""From the JSON's optimizer block to an optimizer: ours by name, or any element-wise one of torch.optim."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.config.errors import ConfigError, nearest
from engine.config.schema import OptimizerConfig
from engine.optim.param_groups import param_groups

MODULATED = ("AGVMAdamW", "AGVMSGD", "AGVMLAMB", "AGVMLARS")
OURS = (*MODULATED, "LAMB", "LARS", "PMDLAMB")
# ZeRO hands an optimizer flat pieces of many parameters: a rule that looks at whole matrices or calls back is wrong there.
_NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam", "Optimizer")


def build_optimizer(config: OptimizerConfig, model: nn.Module, *, warmup_steps: int) -> torch.optim.Optimizer:
    options = dict(config.params)
    lr = options.get("lr")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 <= lr < float("inf"):
        raise ConfigError(f"optimizer.params.lr must be a number >= 0, got {lr!r}")
    rule = find_rule(config.type)
    weight_decay = options.get("weight_decay", _default(rule, "weight_decay", 0.0))
    modules = options.pop("modules", None) if config.type in MODULATED else None
    if modules is not None and not (isinstance(modules, dict) and all(isinstance(p, list) for p in modules.values())):
        raise ConfigError(
            "optimizer.params.modules must give each module's name a list of prefixes, such as "
            f'{{"neck": ["neck"]}}, got {modules!r}'
        )
    groups = param_groups(model, config.paramwise, lr=lr, weight_decay=weight_decay, modules=modules)
    if config.type in MODULATED:
        options.pop("bucket_size", None)  # a setting of `attach`, not of the rule
        if options.setdefault("start_step", "warmup") == "warmup":
            options["start_step"] = warmup_steps
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return rule(groups, **options)
    except (IndexError, OverflowError, TypeError, ValueError) as error:  # torch indexes `betas` before it looks at them
        raise ConfigError(f"optimizer {config.type} does not take these params ({error})") from None


def find_rule(name: str) -> Any:
    """The optimizer's class; ConfigError where there is none of this name that works on flat shards."""
    import engine.optim

    if name in OURS:
        return getattr(engine.optim, name)
    known = [
        n
        for n in dir(torch.optim)
        if isinstance(getattr(torch.optim, n), type)
        and issubclass(getattr(torch.optim, n), torch.optim.Optimizer)
        and n not in _NOT_ELEMENTWISE
    ]
    if name in known:
        return getattr(torch.optim, name)
    if name in _NOT_ELEMENTWISE:
        raise ConfigError(
            f"optimizer {name} cannot work on ZeRO's flat shards: use one of {', '.join((*OURS, *known))}"
        )
    raise ConfigError(
        f'optimizer.type "{name}" is none of {", ".join((*OURS, *known))}{nearest(name, (*OURS, *known))}'
    )


def _default(rule: Any, option: str, otherwise: float) -> float:
    import inspect

    # A rule that only adds to another passes the other's options on.
    found = [inspect.signature(kind.__init__).parameters.get(option) for kind in rule.__mro__]
    return next((p.default for p in found if p is not None and p.default is not inspect.Parameter.empty), otherwise)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's lr is its base times the schedule's factor, whichever group ZeRO has made of it."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
