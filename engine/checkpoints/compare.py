"""Compare the config of a checkpoint with the one to resume with. Each config field declares whether it may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.config.resume_policy import resume_policy
from engine.errors import CheckpointError
from engine.optim.registry import is_modulated

MICRO_BATCH = "train_micro_batch_size_per_gpu"


class Difference(NamedTuple):
    key: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_short(self.saved)} -> {_short(self.now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    first, second = dict(_flat(saved)), dict(_flat(now))
    empty: tuple[Any, ...] = (None, {}, [])
    return [
        Difference(key, first.get(key), second.get(key))
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key) and not (first.get(key) in empty and second.get(key) in empty)
    ]


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines to print for the user; CheckpointError if a difference does not allow to resume."""
    found = differences(saved, now)
    policies = {d.key: resume_policy(d.key) for d in found}
    if MICRO_BATCH in policies and is_modulated(str(now.get("optimizer", {}).get("type"))):
        policies[MICRO_BATCH] = "fixed"  # AGVM's half batches consist of micro-batches
    refused = [d for d in found if policies[d.key] == "fixed"]
    if refused:
        other = "" if any(d.key == MICRO_BATCH for d in refused) else ", micro-batch"
        raise CheckpointError(
            f"the checkpoint was saved with another config ({'; '.join(map(str, refused))}): these keys may not change "
            "on --resume; schedule, optimizer.params, optimizer.paramwise, optimizer.sam, run.ema, data augmentation, "
            f"precision, ZeRO stage, ranks{other} and all that only concerns records may; to start another run from "
            "its weights, give detector.load_from"
        )
    changes = [f"changed, from here on   {d}" for d in found if policies[d.key] == "changes"]
    hidden = ("run.work_dir", "name")
    return changes + [
        f"changed, same result    {d}" for d in found if policies[d.key] == "free" and d.key not in hidden
    ]
