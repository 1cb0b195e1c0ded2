"""An exponential moving average of the weights, kept on the fp32 shards that each rank owns."""

from __future__ import annotations

import torch

from engine.zero.layout import Layout


class ShardEMA:
    """average <- d average + (1 - d) weights after each optimizer step. d rises from 2/11 to `decay`, so that the
    average soon forgets the first weights. A step skipped because of an overflow does not count."""

    def __init__(self, layout: Layout, decay: float) -> None:
        self.layout, self.decay = layout, decay
        self.shards = {k: shard.detach().to(torch.float32, copy=True) for k, shard in layout.shards().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call it after optimizer step `step`, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for k, shard in self.layout.shards().items():
            self.shards[k].lerp_(shard.detach().float(), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights."""
        for k, shard in self.layout.shards().items():
            self.shards[k].copy_(shard)
