"""Activation checkpointing: run a block again in backward instead of keeping its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, *args: Any, call: Callable | None = None, **kwargs: Any) -> Any:
    """`block(*args)`, or `call(*args)` in its place. It is recomputed in backward if gradients are enabled."""
    call = block if call is None else call
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(
        call,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (contextlib.nullcontext(), _frozen_statistics(block)),
        **kwargs,
    )


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """The second pass must not count a batch twice in the running statistics."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    for norm in norms:
        norm.momentum = 0.0
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, counted) in zip(norms, saved):
            norm.momentum, norm.num_batches_tracked = momentum, counted
