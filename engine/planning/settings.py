"""The DeepSpeed settings that decide what is sent, with DeepSpeed's own defaults where the JSON is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.errors import ConfigError
from engine.planning.partition import Sharding

AGVM_BUCKET = 1 << 24  # elements, the default of `attach`
# Settings of zero_optimization with which DeepSpeed sends something else.
_UNPLANNED = (
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "allgather_sequential",
    "use_all_reduce_for_fetch_params",
    "zenflow",
)


@dataclass(frozen=True)
class CommunicationSettings:
    stage: int
    world: int
    accumulation: int
    dtype: str
    communication_dtype: str
    fp32_accumulation: bool  # data_types.grad_accum_dtype fp32 under bf16: BF16_Optimizer at stage 1
    clipping: float
    check_overflow: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    contiguous_gradients: bool
    reduce_scatter: bool
    multi_rank_allreduce: bool
    overlap_comm: bool
    compute_grad_norm: bool
    round_robin_gradients: bool
    parameter_alignment: bool
    sub_group_size: int
    persistence_threshold: int
    model_persistence_threshold: int
    prefetch_bucket_size: int
    max_reuse_distance: int
    max_live_parameters: int
    offload: bool  # of the optimizer

    @property
    def sharding(self) -> Sharding:
        return Sharding(
            stage=self.stage,
            world=self.world,
            dtype=self.dtype,
            sub_group_size=self.sub_group_size,
            round_robin_gradients=self.round_robin_gradients,
            parameter_alignment=self.parameter_alignment,
        )


@dataclass(frozen=True)
class WindowSettings:
    """What an AGVM window captures: `signed` and `squared` reduce a second vector, `norms` does not."""

    kind: str
    bucket_size: int = AGVM_BUCKET


def window_settings(kind: str, params: Mapping[str, Any]) -> WindowSettings | None:
    """From the optimizer's name and its params; None where it is not AGVM."""
    if not kind.startswith("AGVM"):
        return None
    estimator = params.get("estimator", "halves")
    # SGD and LARS look at the gradient itself, the others at a preconditioned one.
    capture = "signed" if estimator == "halves" else "norms" if kind in ("AGVMSGD", "AGVMLARS") else "squared"
    size = params.get("bucket_size")
    return WindowSettings(capture, AGVM_BUCKET if size is None else size)


def layer_numbers(kind: str) -> int:
    """How many sums a layer-wise rule needs of every layer before a step; 0 of a rule that is not."""
    import engine.optim

    rule = getattr(engine.optim, kind, None)
    return getattr(rule, "sums_per_layer", 0)


def stage_refused(config: Any, stage: int) -> bool:
    """Whether AGVM and layer-wise rules stop at a stage that DeepSpeed itself would take (engine/zero/support.py)."""
    kind = config.optimizer.type
    return (
        stage == 0
        and bool(config.deepspeed.get("fp16", {}).get("enabled"))
        and (kind.startswith("AGVM") or layer_numbers(kind) > 0)
    )


def offload_device(deepspeed: Mapping[str, Any], key: str) -> str:
    """Where `offload_optimizer` or `offload_param` puts things; "none" also where the key says so or is null."""
    return str((deepspeed.get("zero_optimization", {}).get(key) or {}).get("device") or "none")


def refuse_sam(config: Any) -> None:
    if config.optimizer.sam is not None:
        raise ConfigError("a run with optimizer.sam is not planned: leave it out, and count every micro-step twice")


def communication_settings(deepspeed: Mapping[str, Any], world: int, accumulation: int) -> CommunicationSettings:
    """From DeepSpeed's keys, checked by `engine.building.check_deepspeed` before."""
    from deepspeed.runtime.config import get_communication_data_type
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        zero = DeepSpeedZeroConfig(**deepspeed.get("zero_optimization", {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"DeepSpeed does not accept zero_optimization.{'.'.join(map(str, first['loc']))} ({first['msg']})"
        ) from None
    bf16 = deepspeed.get("bf16", deepspeed.get("bfloat16", {}))
    half = "bfloat16" if bf16.get("enabled") else "float16" if deepspeed.get("fp16", {}).get("enabled") else "float32"
    for name in _UNPLANNED:
        if getattr(zero, name) != type(zero).model_fields[name].default:
            raise ConfigError(
                f"what DeepSpeed sends with zero_optimization.{name} is not known here: leave it out to plan"
            )
    if deepspeed.get("torch_autocast", {}).get("enabled"):
        raise ConfigError("what DeepSpeed sends with torch_autocast is not known here: leave it out to plan")
    stage = int(zero.stage)
    accumulated = _accumulated(deepspeed)
    given = get_communication_data_type(dict(deepspeed))
    return CommunicationSettings(
        stage=stage,
        world=world,
        accumulation=accumulation,
        dtype=half,
        communication_dtype=half if given is None else _name(given),
        fp32_accumulation=half == "bfloat16" and accumulated == "float32",
        clipping=float(deepspeed.get("gradient_clipping", 0.0)),
        check_overflow=half == "float16" or (half == "bfloat16" and bf16.get("check_grad_overflow", True)),
        reduce_bucket_size=int(zero.reduce_bucket_size),
        allgather_bucket_size=int(zero.allgather_bucket_size),
        contiguous_gradients=zero.contiguous_gradients,
        reduce_scatter=zero.reduce_scatter,
        multi_rank_allreduce=zero.use_multi_rank_bucket_allreduce,
        overlap_comm=bool(zero.overlap_comm),
        compute_grad_norm=zero.compute_grad_norm,
        round_robin_gradients=zero.round_robin_gradients,
        parameter_alignment=zero.parameter_alignment,
        sub_group_size=int(zero.sub_group_size),
        persistence_threshold=int(zero.param_persistence_threshold),
        model_persistence_threshold=int(zero.model_persistence_threshold),
        prefetch_bucket_size=int(zero.prefetch_bucket_size),
        max_reuse_distance=int(zero.max_reuse_distance),
        max_live_parameters=int(zero.max_live_parameters),
        offload=offload_device(deepspeed, "offload_optimizer") != "none",
    )


def _accumulated(deepspeed: Mapping[str, Any]) -> str | None:
    """The type in which gradients are added up, which DeepSpeed 0.19.8 reads only once the model is built."""
    from deepspeed.runtime.config import DtypeEnum

    given = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    try:
        return None if given is None else _name(DtypeEnum(given).value)
    except ValueError:
        raise ConfigError(f'data_types.grad_accum_dtype must be "fp32", "bf16" or "fp16", got {given!r}') from None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
