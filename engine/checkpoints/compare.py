"""The config that a checkpoint was saved with against the one it is to go on with: what may change, and what may not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.checkpoints.errors import CheckpointError

# How a run goes, not what it computes (up to rounding): these may change without a word.
FREE = (
    "name",
    "run.work_dir",
    "run.eval_interval",
    "run.eval_backend",
    "run.eval_batch_size",
    "run.checkpoint_interval",
    "run.keep_last",
    "run.keep_best",
    "run.on_save_error",
    "run.log_interval",
    "run.draw",
    "run.max_nonfinite",
    "data.workers",
    "data.root",
    "data.val",
    "detector.load_from",
    "detector.drop_mismatched",
    "detector.zero_init",
    "detector.skippable",
    "detector.checkpoint_activations",
    "optimizer.params.bucket_size",
    "zero_optimization",
    "gradient_accumulation_steps",
    "timers",
    "compile",
    "disable_python_gc",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "log_level",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "checkpoint",
    "aio",
    "disable_allgather",
    "activation_checkpointing",
)
# What the run computes: another choice, taken from here on, and said.
CHANGES = (
    "schedule",
    "optimizer.params",
    "optimizer.paramwise",
    "optimizer.sam",
    "run.ema",
    "gradient_clipping",
    "data.scale",
    "train_micro_batch_size_per_gpu",
    "data.train_scales",
    "data.flip",
    "data.augmentation",
    "data.classification",
    "detector.sync_bn",
    "bf16",
    "bfloat16",
    "fp16",
    "torch_autocast",
    "data_types",
    "communication_data_type",
    "gradient_predivide_factor",
    "prescale_gradients",
)
# All else is refused: model, data and their order, seed, batch, kind of optimizer. The moments, the position in the
# epoch and the meaning of a step would no longer fit.


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
    empty = (None, {}, [])
    return [
        Difference(key, first.get(key), second.get(key))
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key) and not (first.get(key) in empty and second.get(key) in empty)
    ]


def _below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines to tell the user; CheckpointError where a difference does not let the run go on."""
    found = differences(saved, now)
    changes = [d for d in found if _below(d.key, CHANGES) and not _below(d.key, FREE)]
    refused = [d for d in found if not _below(d.key, FREE) and not _below(d.key, CHANGES)]
    if str(now.get("optimizer", {}).get("type", "")).startswith("AGVM"):
        # Its halves are made of micro-batches.
        refused += [d for d in found if d.key == "train_micro_batch_size_per_gpu"]
        changes = [d for d in changes if d not in refused]
    if refused:
        raise CheckpointError(
            f"the checkpoint was saved with another config ({'; '.join(map(str, refused))}): these keys may not change on "
            f"--resume; {', '.join(CHANGES[:5])}, data augmentation, precision, ZeRO stage, ranks"
            f"{'' if any(d.key == 'train_micro_batch_size_per_gpu' for d in refused) else ', micro-batch'} and all that only "
            "concerns records may; to start another run from its weights, give detector.load_from"
        )
    free = [d for d in found if d not in changes]
    return [f"changed, from here on   {d}" for d in changes] + [
        f"changed, same result    {d}" for d in free if d.key not in ("run.work_dir", "name")
    ]
