"""Keep some parameters whole on every rank under ZeRO-3, and read or write those that are partitioned.

ZeRO-3 gathers the parameters of a module by a collective when a rank enters it. If only some ranks enter a module (no
mask head where no object was found), they wait for ever. A module whose parameters are kept whole can be skipped.
The other two ways to such a hang: `complete_gradients.py` and `module_trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from engine import distributed
from engine.errors import ConfigError, nearest
from engine.zero.scalars import file_shape


def keep_whole(model_engine: Any, prefixes: Sequence[str]) -> None:
    """Keep the modules at `prefixes` whole on every rank under ZeRO-3, so that a rank may skip them.

    DeepSpeed 0.19.8 keeps persistent parameters whole once it has fetched them, and checks that all ranks enter the
    same modules in the same order. So they are gathered here, before the first step, and DeepSpeed's hooks are removed.
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
    partitioned = [p for p in persistent or [] if p.ds_status.name == "NOT_AVAILABLE"]
    if partitioned:
        partitioned[0].all_gather(partitioned)


def whole_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every entry of the state dict, gathered on every rank, one at a time. Copy an entry to keep it."""
    import deepspeed

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict(keep_vars=True).items():
        parameter: Any = parameters.get(name, value)
        if hasattr(parameter, "ds_id") and parameter.ds_status.name != "AVAILABLE":  # one that is gathered stays so
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().view(file_shape(parameter))
        else:
            yield name, value.detach().view(file_shape(parameter))


@torch.no_grad()
def copy_into(target: Any, value: torch.Tensor) -> None:
    """Copy into a parameter or buffer. If it is partitioned, all ranks call this together; rank 0's value counts."""
    if hasattr(target, "ds_id"):
        import deepspeed

        was_whole = target.ds_status.name == "AVAILABLE"
        with deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if distributed.rank() == 0:
                target.copy_(value)
        if was_whole:  # `keep_whole` keeps it on every rank
            target.all_gather([target])
    else:
        target.copy_(value)
