"""This process as one rank of many that are not there, with tensors that have no storage.

torch's fake process group takes every collective and does nothing; on the meta device tensors have a shape and no
data. So `deepspeed.initialize` builds what it would build on that rank, in seconds and without its memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from engine.zero.processes import compile_nothing, import_deepspeed, reset_distributed


@contextlib.contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Inside, this is rank `rank` of `world`; objects cannot be exchanged (`distributed.together`, ...)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's test helpers take a second to import

    deepspeed = import_deepspeed()
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
    compile_nothing()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        with _quiet(deepspeed):
            yield
    finally:
        reset_distributed()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _quiet(deepspeed: Any) -> Iterator[None]:
    """Without DeepSpeed's notes on a run that is none."""
    level = deepspeed.utils.logger.level
    deepspeed.utils.logger.setLevel("ERROR")
    try:
        yield
    finally:
        deepspeed.utils.logger.setLevel(level)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """New tensors on the meta device, and DeepSpeed's accelerator too, which knows all precisions: the run's will."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  (collectives of meta tensors)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    accelerator, defragment = get_accelerator(), stage3.defragment
    answers = {
        "device_name": "meta",
        "current_device_name": "meta",
        "current_device": "meta",
        "is_fp16_supported": True,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(accelerator, name, lambda *_, answer=answer: answer)
    stage3.defragment = _defragment
    try:
        with torch.device("meta"):
            yield
    finally:
        stage3.defragment = defragment
        for name in answers:
            delattr(accelerator, name)  # the methods of the class show again


def _defragment(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Partitions as views of one flat tensor, as in DeepSpeed 0.19.8, which goes through the CPU to get there."""
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype)
    offset = 0
    for tensor in tensors:
        tensor.data = flat.narrow(0, offset, tensor.numel())
        offset += tensor.numel()
    return flat


def pretend_offloading(engine: Any, settings: dict[str, Any], keys: list[str]) -> None:
    """Write offloading, which was left out to build the engine, back into its config: what attaches may refuse it."""
    asked = engine._config.zero_config.model_validate(settings.get("zero_optimization", {}))
    for key in keys:
        setattr(engine._config.zero_config, key, getattr(asked, key))
