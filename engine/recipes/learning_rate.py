"""How the learning rate grows with the batch: linearly up to a knee, and more slowly beyond it.

SGD      linear to 128 (256 for semantic segmentation), then sqrt(2) for every doubling: the square root of the batch
AdamW    "almost the same" (A.5): linear to 128, then sqrt(1.5) for every doubling
MegDet   linear at every batch
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.recipes.setting import Setting, Source


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """eta(b) = eta(b0) s(b) / s(b0),   s(b) = min(b, knee) sqrt(doubling)^log2(max(b / knee, 1))

    `doubling` is the square of the factor for one doubling of b: 2 gives the square root of b. Without a knee s(b) = b.
    """

    name: str
    lr: float  # eta(b0)
    batch: int = 32  # b0
    knee: int | None = 128
    doubling: float = 2.0
    start_source: Source = "paper"  # of eta(b0)
    source: Source = "paper"  # of eta at any other batch

    def __call__(self, batch: int) -> float:
        return self.lr * (self._growth(batch) / self._growth(self.batch))

    def _growth(self, batch: int) -> float:
        if self.knee is None:
            return float(batch)
        return min(batch, self.knee) * self.doubling ** (math.log2(max(batch / self.knee, 1.0)) / 2)

    def setting(self, batch: int) -> Setting:
        root = "square root" if self.doubling == 2 else f"sqrt({self.doubling:g}) a doubling"
        law = f"{self.name}: linear {'at every batch' if self.knee is None else f'to {self.knee}, {root} beyond'}"
        source = self.start_source if batch == self.batch else self.source
        return Setting("optimizer.params.lr", self(batch), f"{self._product(batch)}; {law}", source)

    def _product(self, batch: int) -> str:
        if batch == self.batch:
            return f"{self.lr:g} at batch {batch}"
        knee = max(batch, self.batch) if self.knee is None else self.knee
        linear = min(batch, knee) / min(self.batch, knee)
        doublings = math.log2(max(batch, knee) / max(self.batch, knee))
        text = f"{self.lr:g}"
        if linear != 1:
            text += f" x {linear:.4g}"
        if doublings and self.doubling == 2:
            text += f" x sqrt({2**doublings:.4g})"
        elif doublings:
            text += f" x sqrt({self.doubling:g})^{doublings:.4g}"
        return f"{text} from batch {self.batch}"
