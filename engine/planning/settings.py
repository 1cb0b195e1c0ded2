"""What a plan has to know of the optimizer: what an AGVM window captures, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.optim.agvm import BUCKET_SIZE, AGVMOptimizer
from engine.optim.registry import OURS, is_modulated, sums_per_layer


@dataclass(frozen=True)
class WindowSettings:
    """What an AGVM window captures: `signed` and `squared` reduce a second vector, `norms` does not."""

    kind: str
    bucket_size: int = BUCKET_SIZE


def window_settings(kind: str, params: Mapping[str, Any]) -> WindowSettings | None:
    """From the optimizer's name and its params; None where it is not AGVM."""
    rule = OURS.get(kind)
    if rule is None or not issubclass(rule, AGVMOptimizer):
        return None
    size = params.get("bucket_size")
    return WindowSettings(rule.companion_of(params.get("estimator", "halves")), BUCKET_SIZE if size is None else size)


def stage_refused(config: Any, stage: int) -> bool:
    """Whether AGVM and layer-wise rules stop at a stage that DeepSpeed itself would take (engine/zero/support.py)."""
    kind = config.optimizer.type
    return (
        stage == 0
        and bool(config.deepspeed.get("fp16", {}).get("enabled"))
        and (is_modulated(kind) or sums_per_layer(kind) > 0)
    )


def refuse_sam(config: Any) -> None:
    if config.optimizer.sam is not None:
        raise ConfigError("a run with optimizer.sam is not planned: leave it out, and count every micro-step twice")
