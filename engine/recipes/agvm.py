"""AGVM's two numbers: the interval tau, and alpha of the moving average."""

from __future__ import annotations

from dataclasses import dataclass

from engine.recipes.setting import Setting, Source

ALPHA = 0.97
LARGE = 1000  # the paper says "larger than 1K", and its row of batch 1024 has the shorter interval


@dataclass(frozen=True)
class Interval:
    """tau: optimizer steps between two measurements of the gradient variance."""

    usual: int = 10
    large: int = 5
    source: Source = "paper"

    def settings(self, batch: int) -> list[Setting]:
        tau = self.large if batch > LARGE else self.usual
        rule = f"{self.usual}, and {self.large} above batch {LARGE}" if self.usual != self.large else "at every batch"
        return [
            Setting("optimizer.params.tau", tau, rule, self.source),
            Setting("optimizer.params.alpha", ALPHA, "at every batch", self.source),
        ]
