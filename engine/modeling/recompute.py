"""Activation checkpointing: recompute blocks in backward instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from engine.errors import ConfigError, nearest
from engine.modeling.blocks import block_name
from models.recompute import recomputed


def checkpoint_blocks(model: nn.Module, prefixes: Sequence[str]) -> int:
    """Checkpoint every block below `prefixes`, or the module itself if it has none; returns their number."""
    modules = dict(model.named_modules())
    count = 0
    for prefix in prefixes:
        if prefix not in modules:
            raise ConfigError(
                f'detector.checkpoint_activations: the detector has no module "{prefix}"{nearest(prefix, modules)}'
            )
        names = {block_name(f"{prefix}.{name}") for name, _ in modules[prefix].named_parameters()} - {None}
        for name in names or {prefix}:
            modules[name].forward = _Recomputed(modules[name])
            count += 1
    return count


def is_recomputed(module: nn.Module) -> bool:
    return isinstance(module.forward, _Recomputed)


class _Recomputed:
    def __init__(self, block: nn.Module) -> None:
        self.block, self.plain = block, block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.block.training:
            return self.plain(*args, **kwargs)
        return recomputed(self.block, *args, call=self.plain, **kwargs)
