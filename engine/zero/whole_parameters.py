"""Parameters that ZeRO-3 keeps whole on every rank, and whole copies of those it does not.

A module that only some ranks enter in a step (a mask head where no object was found) would make ZeRO-3 wait for ever:
its parameters are gathered by a collective on entry. Kept whole, it can be skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError, nearest
from engine.zero.scalars import file_shape


def keep_whole(model_engine: Any, prefixes: Sequence[str]) -> None:
    """Keep the modules at `prefixes` whole on every rank under ZeRO-3, so that a rank may skip them.

    DeepSpeed 0.19.8 keeps persistent parameters whole once it has fetched them, and checks that all ranks enter the
    same modules in the same order. So they are gathered here, before the first step, and DeepSpeed's hooks leave them.
    """
    persistent = getattr(model_engine.optimizer, "persistent_parameters", None)
    modules = dict(model_engine.module.named_modules())
    for prefix in prefixes:
        if prefix not in modules:
            raise ConfigError(f'detector.skippable: the detector has no module "{prefix}"{nearest(prefix, modules)}')
        if persistent is None:
            continue
        for parameter in modules[prefix].parameters():
            if not parameter.ds_persist:
                parameter.ds_persist = True
                persistent.append(parameter)
        for module in modules[prefix].modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key in [k for k, hook in hooks.items() if hook.__module__.startswith("deepspeed.")]:
                    del hooks[key]
    apart = [p for p in persistent or [] if p.ds_status.name == "NOT_AVAILABLE"]
    if apart:
        apart[0].all_gather(apart)


def whole_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every entry of the state dict, one at a time and whole, on every rank; not to be kept beyond its turn."""
    import deepspeed

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict(keep_vars=True).items():
        parameter = parameters.get(name, value)
        if hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE":  # one that is whole stays so
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().view(file_shape(parameter))
        else:
            yield name, value.detach().view(file_shape(parameter))


@torch.no_grad()
def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Into a parameter or buffer, which may be partitioned: then all ranks call this together."""
    if hasattr(target, "ds_id"):
        import deepspeed

        was_whole = target.ds_status.name == "AVAILABLE"
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            target.copy_(value)
        if was_whole:  # kept on every rank, so that a rank may skip its module
            target.all_gather([target])
    else:
        target.copy_(value)
