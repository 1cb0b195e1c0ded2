"""A network of three modules trained by AGVM under DeepSpeed for a few steps, and its plain twin in one process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import distributed
from engine.checkpoints.finding import find_checkpoint
from engine.checkpoints.restoring import restore
from engine.checkpoints.saving import save_checkpoint
from engine.checkpoints.state import TrainingState
from engine.config import BatchPlan
from engine.optim import AGVMAdamW, module_groups
from engine.optim.reference import ReferenceAdamW
from engine.zero.engine import initialise_engine, read_layout
from engine.zero.whole_parameters import whole_state

MODULES = ("backbone", "neck", "head")
MICRO, ACCUMULATION, TAU = 3, 2, 2  # accumulation gives one rank, too, two micro-batches to compare
# Powers of two, so that products with them are exact.
OPTIONS: dict[str, Any] = dict(lr=2**-7, weight_decay=2**-4, tau=TAU, alpha=0.75, anchor="backbone")


class ThreeModules(nn.Module):
    """Odd sizes, so that no number of ranks divides them; `neck` is used twice. No convolution: those of a GPU library
    round to TF32 and need not be deterministic."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(19, 27), nn.Tanh(), nn.LayerNorm(27), nn.Linear(27, 13))
        self.neck = nn.Linear(13, 13)
        self.head = nn.ModuleDict({"box": nn.Linear(13, 5), "score": nn.Linear(13, 1, bias=False)})
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.tanh(self.neck(torch.tanh(self.neck(self.backbone(x)))))
        return (self.head["score"](z) - y[:, :1]).square().mean() + (self.head["box"](z) - y[:, 1:]).square().mean()


def micro_batch(step: int, j: int) -> tuple[Tensor, Tensor]:
    """Micro-batch j of a step, the same whichever rank asks for it."""
    generator = torch.Generator().manual_seed(100_003 * step + j)
    x, noise = torch.randn(MICRO, 19, generator=generator), torch.randn(MICRO, 6, generator=generator)
    device = distributed.device()
    return x.to(device), (noise + 3 * x.mean()).to(device)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of fp32 matrices in fp32: TF32 has ten bits, and equalities hold to 1e-3 only."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class SmallRun:
    """`ThreeModules` under DeepSpeed. Close it before the next one is built."""

    def __init__(self, stage: int, *, seed: int = 1) -> None:
        self.stage, self.done = stage, 0
        model = ThreeModules(seed)
        self.optimizer = AGVMAdamW(module_groups(model, {name: [name] for name in MODULES}), **OPTIONS)
        self.engine = initialise_engine(model, self.optimizer, _settings(stage))
        self.optimizer.attach(self.engine, bucket_size=97)  # many buckets even for so small a network

    def train(self, until: int) -> None:
        """Optimizer steps up to this number."""
        for step in range(self.done + 1, until + 1):
            for k in range(ACCUMULATION):
                x, y = micro_batch(step, k * distributed.world_size() + distributed.rank())
                self.engine.backward(self.engine(x, y))
                self.engine.step()
        self.done = until

    def weights(self) -> list[Tensor]:
        """All weights, whole, on every rank."""
        return [value.float().clone() for _, value in whole_state(self.engine.module)]

    def save(self, folder: Path) -> None:
        save_checkpoint(self._state(), folder, self.done)

    def resume(self, folder: Path) -> None:
        checkpoint = find_checkpoint(folder)
        restore(self._state(), checkpoint, progress=lambda _: None)
        self.done = checkpoint.step

    def _state(self) -> TrainingState:
        world = distributed.world_size()
        return TrainingState(
            engine=self.engine,
            optimizer=self.optimizer,
            layout=read_layout(self.engine),
            batch=BatchPlan(MICRO * ACCUMULATION * world, MICRO, ACCUMULATION, world),
            stage=self.stage,
            precision=torch.float32,
            ema=None,
            meta={"config": {}},
        )

    def close(self) -> None:
        """Take DeepSpeed's hooks off the process, or they would see the next run's modules."""
        self.optimizer.detach()
        self.engine.destroy()
        del self.engine, self.optimizer
        gc.collect()


@contextlib.contextmanager
def small_run(stage: int, *, seed: int = 1) -> Iterator[SmallRun]:
    with full_precision():
        run = SmallRun(stage, seed=seed)
        try:
            yield run
        finally:
            run.close()


def _settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 200},
    }


class TwinRun:
    """The algorithm line by line on whole gradients of every rank's micro-batches, one after another."""

    def __init__(self) -> None:
        self.model = ThreeModules().to(distributed.device())
        # The twin's update works in place, on the model's own weights.
        self.twin = ReferenceAdamW({name: [p.data for p in self._parameters(name)] for name in MODULES}, **OPTIONS)

    def _parameters(self, module: str) -> list[nn.Parameter]:
        return list(self.model.get_submodule(module).parameters())

    def step(self, step: int) -> None:
        gradients = []
        for j in range(ACCUMULATION * distributed.world_size()):
            self.model.zero_grad()
            self.model(*micro_batch(step, j)).backward()
            gradients.append({name: [_gradient(p) for p in self._parameters(name)] for name in MODULES})
        self.twin.step(gradients)

    def weights(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.model.state_dict().values()]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    """The norm of the difference of all weights, relative to their norm."""
    a, b = (torch.cat([x.double().flatten() for x in weights]) for weights in (first, second))
    return float((a - b).norm() / b.norm())


def relative(first: dict[str, float], second: dict[str, float]) -> float:
    """The largest relative difference; infinite if the modules are not the same."""
    if first.keys() != second.keys():
        return float("inf")
    return max((abs(first[i] - second[i]) / max(abs(second[i]), 1e-12) for i in first), default=0.0)
