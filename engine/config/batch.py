"""The batch triangle: train_batch_size = micro batch x accumulation steps x ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.errors import ConfigError, quoted

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class BatchPlan(NamedTuple):
    total: int
    micro: int
    accumulation: int
    world: int

    @property
    def micro_batches(self) -> int:
        """R, the micro-batches of one optimizer step over all ranks."""
        return self.accumulation * self.world

    def as_keys(self) -> dict[str, int]:
        return dict(zip(KEYS, (self.total, self.micro, self.accumulation)))


def solve_batch(config: dict[str, Any], world: int) -> BatchPlan:
    """Compute whichever of the three keys is missing or "auto". ConfigError if the three do not fit together."""
    given: dict[str, int | None] = {}
    for key in KEYS:
        value = config.get(key, "auto")
        if value in ("auto", None):
            given[key] = None
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            given[key] = value
        else:
            raise ConfigError(f'{key} must be a whole number >= 1 or "auto", got {quoted(value)}')
    total, micro, accumulation = (given[key] for key in KEYS)

    if total is None:
        if micro is None:
            raise ConfigError("give train_batch_size or train_micro_batch_size_per_gpu: neither is set")
        accumulation = accumulation or 1
        return BatchPlan(micro * accumulation * world, micro, accumulation, world)
    if micro is None:
        # A global batch alone means no accumulation.
        accumulation = accumulation or 1
        micro = _divide(total, accumulation * world, f"{accumulation} accumulation steps x {world} ranks")
    elif accumulation is None:
        accumulation = _divide(total, micro * world, f"micro-batch {micro} x {world} ranks")
    if micro * accumulation * world != total:
        raise ConfigError(
            f"train_batch_size {total} is not micro-batch {micro} x accumulation {accumulation} x {world} ranks = "
            f'{micro * accumulation * world}: change one of the three, set one to "auto", or change the number of ranks'
        )
    return BatchPlan(total, micro, accumulation, world)


def _divide(total: int, by: int, what: str) -> int:
    if total % by:
        below, above = total // by * by, (total // by + 1) * by
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"train_batch_size {total} cannot be divided by {what} = {by}: use {near}, or other factors")
    return total // by
