"""The state of a dynamic loss scale, whichever of DeepSpeed's wrappers holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The names are the same in all scalers; some scalers have only a part of them.
_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def saved_scale(scaler: Any) -> dict[str, Any]:
    """The state of a dynamic loss scale; empty for a static one."""
    if scaler is None or not (getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)):
        return {}
    return {key: getattr(scaler, key) for key in _FIELDS if hasattr(scaler, key)}


def restore_scale(scaler: Any, saved: Mapping[str, Any]) -> None:
    for key in saved_scale(scaler).keys() & saved.keys():
        setattr(scaler, key, saved[key])
