"""DeepSpeed's own keys of the JSON: their names, what `--resume` may change, and checks that need no DeepSpeed.

DeepSpeed 0.19.8 silently ignores top-level keys that it does not know, so we check the names.
DeepSpeed itself checks the values, once it is imported (`engine.zero.settings.check_deepspeed`).
"""

from __future__ import annotations

from typing import Any

from engine.config.schema import ResumePolicy
from engine.errors import ConfigError, nearest, quoted, short

_NAMES: dict[ResumePolicy, str] = {
    "free": """
        zero_optimization gradient_accumulation_steps timers compile disable_python_gc
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown
        memory_breakdown dump_state log_level flops_profiler comms_logger tensorboard csv_monitor wandb comet
        checkpoint aio disable_allgather activation_checkpointing
    """,
    "changes": """
        gradient_clipping train_micro_batch_size_per_gpu bf16 bfloat16 fp16 torch_autocast data_types
        communication_data_type gradient_predivide_factor prescale_gradients
    """,
    "fixed": """
        train_batch_size managed_gradient_accumulation gradient_allreduce_op
        seq_parallel_communication_data_type vocabulary_size autotuning data_efficiency pipeline tensor_parallel
        hybrid_engine datastates_ckpt use_data_before_expert_parallelism dataloader_drop_last
        weight_quantization expert_parallel
    """,
}
DEEPSPEED_KEYS: dict[str, ResumePolicy] = {name: policy for policy, names in _NAMES.items() for name in names.split()}

# Keys of older versions. DeepSpeed 0.19 refuses them with an exception that is no ValueError and no AssertionError.
_OLD = """
        amp compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula
        progressive_layer_drop quantize_training sparse_attention sparse_gradients
"""
REMOVED_KEYS = frozenset(_OLD.split())


def check_names(data: dict[str, Any], blocks: tuple[str, ...]) -> None:
    """Refuse top-level keys that are neither DeepSpeed's nor one of our `blocks`."""
    if "scheduler" in data:
        raise ConfigError('DeepSpeed\'s "scheduler" block is refused: the learning rate belongs to "schedule"')
    removed = [key for key in data if key in REMOVED_KEYS]
    if removed:
        raise ConfigError(f'DeepSpeed 0.19 no longer has "{removed[0]}": remove the key')
    unknown = [key for key in data if key not in DEEPSPEED_KEYS and key not in blocks]
    if unknown:
        raise ConfigError(f'unknown key "{short(unknown[0])}"{nearest(unknown[0], (*DEEPSPEED_KEYS, *blocks))}')


def check_values(config: dict[str, Any]) -> None:
    """Check the values that our own code reads before DeepSpeed is imported."""
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f'zero_optimization must be an object such as {{"stage": 2}}, got {quoted(zero)}')
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {quoted(stage)}")
    for key in ("bf16", "bfloat16", "fp16"):
        block = config.get(key, {})
        if not isinstance(block, dict) or not isinstance(block.get("enabled", False), bool):
            raise ConfigError(f'{key} must be an object such as {{"enabled": true}}, got {quoted(block)}')
    if config.get("bf16", config.get("bfloat16", {})).get("enabled") and config.get("fp16", {}).get("enabled"):
        raise ConfigError("bf16 and fp16 are both enabled: choose one")
    for key in ("gradient_predivide_factor", "steps_per_print"):  # DeepSpeed divides by them in the first step
        number = config.get(key)
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or number <= 0):
            raise ConfigError(f"{key} must be a number above 0, got {quoted(number)}")
    types = config.get("data_types", {})
    if not isinstance(types, dict) or types.keys() - {"grad_accum_dtype"}:  # DeepSpeed ignores other keys
        raise ConfigError(f'data_types must be an object such as {{"grad_accum_dtype": "fp32"}}, got {quoted(types)}')
    if config.get("datastates_ckpt"):
        raise ConfigError("datastates_ckpt is refused: checkpoints are written by this program")
    clipping = config.get("gradient_clipping", 0.0)
    if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or not 0 <= clipping < float("inf"):
        raise ConfigError(f"gradient_clipping must be a number >= 0 (0 means none), got {quoted(clipping)}")
