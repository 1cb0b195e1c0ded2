"""DeepSpeed's settings, read by DeepSpeed itself: whether it accepts them, and those that decide what is sent.

DeepSpeed's config classes are imported inside functions, because importing DeepSpeed takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from engine.config.batch import KEYS as BATCH_KEYS
from engine.config.keys import value_at
from engine.errors import ConfigError, first_line, quoted, short
from engine.zero.geometry import Sharding
from engine.zero.halves import Halves

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
    def keeps_local(self) -> bool:
        """Whether DeepSpeed keeps the local gradient until the boundary."""
        return self.stage < 2

    @property
    def whole_gradient(self) -> bool:
        """Whether every rank reduces the whole gradient at the boundary: at stage 0, and in BF16_Optimizer, which has
        none of ZeRO's buckets."""
        return self.stage == 0 or (self.stage == 1 and self.fp32_accumulation)

    @property
    def halves(self) -> Halves:
        return Halves(self.world, self.accumulation, self.keeps_local)

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


def offload_device(deepspeed: Mapping[str, Any], key: str) -> str:
    """Where `offload_optimizer` or `offload_param` puts things; "none" also where the key says so or is null."""
    return str((deepspeed.get("zero_optimization", {}).get(key) or {}).get("device") or "none")


def check_deepspeed(settings: Mapping[str, Any]) -> None:
    """Let DeepSpeed read its own keys before anything is built, and name the one it does not take."""
    from deepspeed.runtime.config import DeepSpeedConfig

    with _named_refusals(settings=settings):
        DeepSpeedConfig(dict(settings))


@contextlib.contextmanager
def _named_refusals(block: str | None = None, settings: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A ConfigError with the key that DeepSpeed's reader refused, in `block` or in the block of the reader."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = block or error.title.removeprefix("DeepSpeed").removesuffix("Config").lower()
        where = "zero_optimization" if where == "zero" else where
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f'DeepSpeed does not accept "{short(key)}" in {where} ({short(first["msg"], 300)})') from None
    except Exception as error:  # its readers raise whatever a wrong value leads to
        reason = f"{type(error).__name__}: {first_line(error)}"
        culprit = None if settings is None else _culprit(settings)
        what = f"{culprit}, which is {quoted(value_at(settings or {}, culprit))}" if culprit else "this config"
        raise ConfigError(f"DeepSpeed does not accept {what} ({reason})") from None


def _culprit(settings: Mapping[str, Any]) -> str | None:
    """The key without which DeepSpeed accepts the config: of a block, or of a value in it."""
    for block, content in settings.items():
        if block in BATCH_KEYS or not _accepted({key: value for key, value in settings.items() if key != block}):
            continue
        for key in content if isinstance(content, Mapping) else ():
            if _accepted({**settings, block: {other: content[other] for other in content if other != key}}):
                return f"{block}.{key}"
        return block
    return None


def _accepted(settings: Mapping[str, Any]) -> bool:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(settings))
    except Exception:  # as above
        return False
    return True


def communication_settings(deepspeed: Mapping[str, Any], world: int, accumulation: int) -> CommunicationSettings:
    """From DeepSpeed's keys, checked by `check_deepspeed` before."""
    from deepspeed.runtime.config import get_communication_data_type
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with _named_refusals("zero_optimization"):
        zero = DeepSpeedZeroConfig(**deepspeed.get("zero_optimization", {}))
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
        raise ConfigError(
            f'data_types.grad_accum_dtype must be "fp32", "bf16" or "fp16", got {quoted(given)}'
        ) from None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
