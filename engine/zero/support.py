"""Which DeepSpeed features AGVM, SAM, LARS and LAMB work with. Others are refused by name, on `attach`."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

TRIED = "0.19."


def refuse_unsupported(engine: Any, who: str) -> None:
    """ValueError naming the first feature under which `who` would read gradients or shards wrongly."""
    zero = engine._config.zero_config
    stage = engine.zero_optimization_stage()
    offload = zero.offload_optimizer
    device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
    parameters = zero.offload_param
    checks = {
        "mixture of experts": engine.has_moe_layers,
        "pipeline parallelism": engine.pipeline_parallelism,
        "sequence parallelism": getattr(engine, "sequence_parallel_size", 1) > 1,
        "tensor or model parallelism": engine.mpu is not None or engine.autotp_size() > 1,
        "hpZ (zero_hpz_partition_size)": zero.zero_hpz_partition_size > 1,
        "quantized gradients (zero_quantized_gradients)": zero.zero_quantized_gradients,
        "DeepCompile": engine.is_deepcompile_enabled(),
        "elastic_checkpoint": stage > 0 and zero.elastic_checkpoint,
        "fp16 at stage 0": stage == 0 and engine.fp16_enabled(),
        "torch_autocast in fp16 (it brings a second loss scale)": engine.torch_autocast_enabled()
        and str(engine.torch_autocast_dtype()).split(".")[-1] == "float16",
        "managed_gradient_accumulation false": not engine.managed_gradient_accumulation(),
        "ZenFlow": engine.zenflow_config() is not None,
        "SuperOffload": offload is not None and engine.super_offload(),
        "optimizer offload to NVMe": device == "nvme",
        "parameter offload to NVMe": parameters is not None and "nvme" in str(parameters.device),
        "partial optimizer offload (ratio < 1)": offload is not None and engine.zero_partial_offload() < 1,
        "gradient_allreduce_op sum": not engine.gradient_average,
    }
    for feature, used in checks.items():
        if used:
            raise ValueError(
                f"{who} does not support {feature}: turn it off in the DeepSpeed config, or use another optimizer"
            )


def check_own_engine(engine: Any, client: Any, *, name: str, attached: bool) -> None:
    if attached:
        raise ValueError(f"this {name} is attached already: attach it once, right after deepspeed.initialize")
    if getattr(engine, "basic_optimizer", None) is not client:
        raise ValueError(
            f"this {name} is not the engine's: pass it to deepspeed.initialize(optimizer=...) and "
            "attach the engine that returns"
        )


def check_micro_batches(world: int, accumulation: int) -> None:
    if world * accumulation < 2:
        raise ValueError(
            f"AGVM compares at least two micro-batches per optimizer step, got {world} rank x "
            f"gradient_accumulation_steps {accumulation}: set gradient_accumulation_steps to 2 or more, "
            "or train on more ranks"
        )


def note_version(version: str) -> None:
    if not version.startswith(TRIED):
        logger.warning(
            "AGVM was tried on deepspeed %sx and not on %s; its first window compares the captured gradient "
            "with DeepSpeed's and stops if they differ",
            TRIED,
            version,
        )
