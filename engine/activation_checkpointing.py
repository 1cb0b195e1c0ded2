"""Recompute blocks in backward instead of keeping their activations."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.blocks import block_name
from engine.config.errors import ConfigError, nearest


def checkpoint_blocks(model: nn.Module, prefixes: Sequence[str]) -> int:
    """Checkpoint every block below `prefixes`, or the module itself where it has none, and count them."""
    modules = dict(model.named_modules())
    count = 0
    for prefix in prefixes:
        if prefix not in modules:
            raise ConfigError(f'detector.checkpoint_activations: the detector has no module "{prefix}"'
                              f"{nearest(prefix, modules)}")
        names = {block_name(f"{prefix}.{name}") for name, _ in modules[prefix].named_parameters()} - {None}
        for name in names or {prefix}:
            modules[name].forward = _Recomputed(modules[name])
            count += 1
    return count


class _Recomputed:
    def __init__(self, block: nn.Module) -> None:
        self.block, self.plain = block, block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.block.training):
            return self.plain(*args, **kwargs)
        return checkpoint(self.plain, *args, use_reentrant=False, preserve_rng_state=True,
                          context_fn=lambda: (contextlib.nullcontext(), _frozen_statistics(self.block)), **kwargs)


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """The second pass must not count a batch twice in the running statistics."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, saved):
            norm.momentum, norm.num_batches_tracked = momentum, counted
