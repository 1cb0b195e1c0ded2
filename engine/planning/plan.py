"""The plan of a run: its model as shapes, traced once for each size that is asked for, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from engine.config import BatchPlan, RunConfig, solve_batch
from engine.errors import ConfigError, UserError
from engine.modeling.precision import Precision
from engine.optim.registry import build_optimizer, count_moments
from engine.planning.image_sizes import ImageSizes, Size
from engine.planning.known_data import known_data, planned_classes
from engine.planning.memory import OFFLOADS, Memory, MemoryPlan
from engine.planning.model_facts import ModelFacts, model_facts, refuse_sam, stage_refused
from engine.planning.step_trace import StepTrace, build_shape_model, trace_step
from engine.planning.traffic import Collective, step_traffic
from engine.zero.fake_ranks import fake_ranks
from engine.zero.settings import CommunicationSettings, check_deepspeed, communication_settings, offload_device

BACKBONE = ["backbone"]  # what is recomputed where the config does not say


class Way(NamedTuple):
    """A way to run the same training."""

    stage: int
    offload: str  # one of OFFLOADS
    recompute: bool  # whether activations are recomputed in backward


class Plan:
    """Everything is computed when first asked for. `at` gives the plan for another `world`, which shares the traces."""

    def __init__(
        self,
        config: RunConfig,
        world: int,
        *,
        images: int | None = None,
        classes: int | None = None,
        fixed_size: Size | None = None,
        objects: int = 7,
    ) -> None:
        for name, value in (("--world-size", world), ("--objects", objects)):
            if value < 1:
                raise UserError(f"{name} must be a whole number >= 1, got {value}")
        refuse_sam(config)
        self.config, self.world, self.objects = config, world, objects
        if stage_refused(config, self.way.stage):
            raise ConfigError(
                f"{config.optimizer.type} does not support fp16 at ZeRO stage 0: set zero_optimization.stage to "
                "1, 2 or 3, or use bf16"
            )
        self.batch: BatchPlan = solve_batch(config.deepspeed, world)
        with fake_ranks(world):  # because DeepSpeed asks for the number of ranks
            check_deepspeed({**config.deepspeed, **self.batch.as_keys()})
        self.settings()  # which refuses what DeepSpeed reads only later
        self.data = known_data(config, images=images, classes=classes)
        self.sizes = ImageSizes(config.data, self.batch.micro, fixed=fixed_size)
        self.model = ModelFacts([])
        self._traces: dict[tuple[Size, bool, int], StepTrace] = {}
        self._traffic: dict[CommunicationSettings, list[Collective]] = {}

    @property
    def way(self) -> Way:
        """The config's own."""
        away = [offload_device(self.config.deepspeed, key) != "none" for key in ("offload_param", "offload_optimizer")]
        offload = OFFLOADS[2] if away[0] else OFFLOADS[1] if away[1] else OFFLOADS[0]
        return Way(self.config.zero_stage, offload, bool(self.config.detector.checkpoint_activations))

    @property
    def steps(self) -> int:
        steps, epochs = self.config.schedule.steps, self.config.schedule.epochs
        return steps if steps is not None else max(1, round((epochs or 0) * self.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.data.train // self.batch.total)

    def trace(self, size: Size, *, recompute: bool | None = None) -> StepTrace:
        """A micro-step at a size, with or without activation checkpointing (default: as the config has it)."""
        recompute = self.way.recompute if recompute is None else recompute
        key = (size, recompute, self.batch.micro)
        if key not in self._traces:
            names = (self.config.detector.checkpoint_activations or BACKBONE) if recompute else []
            detector = self.config.detector.model_copy(update={"checkpoint_activations": names})
            config = self.config.model_copy(update={"detector": detector})
            classes = planned_classes(self.data)
            # Batch norm over all ranks keeps other tensors than over one; more than two make no difference.
            with fake_ranks(min(self.world, 2)):
                model = build_shape_model(config, classes)
                if not self.model.parameters or recompute == self.way.recompute:
                    optimizer = build_optimizer(config.optimizer, model, warmup_steps=0)
                    self.model = model_facts(model, optimizer, config)
                self._traces[key] = trace_step(
                    model, config, classes, micro=self.batch.micro, size=size, objects=self.objects
                )
        return self._traces[key]

    def settings(self, stage: int | None = None) -> CommunicationSettings:
        deepspeed = dict(self.config.deepspeed)
        if stage is not None:
            deepspeed["zero_optimization"] = {**deepspeed.get("zero_optimization", {}), "stage": stage}
        return communication_settings(deepspeed, self.world, self.batch.accumulation)

    def traffic(self, settings: CommunicationSettings, order: Sequence[int]) -> list[Collective]:
        """Every collective of a step and of a window, without those of batch norms, which are in the trace."""
        if settings not in self._traffic:
            self._traffic[settings] = step_traffic(replace(self.model, norms=()), settings, order=order)
        return self._traffic[settings]

    def memory(self, way: Way | None = None, *, window: bool = True) -> Memory:
        """At the largest images, by default in the config's own way."""
        stage, offload, recompute = way or self.way
        trace = self.trace(self.sizes.largest, recompute=recompute)
        model = self.model if window else replace(self.model, window=None)
        average = self.config.run.ema is not None
        return MemoryPlan(trace, model, self.settings(stage), self.moments, offload, average).memory()

    @cached_property
    def moments(self) -> int:
        return count_moments(self.config.optimizer)

    @cached_property
    def dtype(self) -> str:
        return str(Precision.of(self.config.deepspeed).dtype).removeprefix("torch.")

    def at(self, world: int, batch: int | None = None) -> Plan:
        """The same run on another number of ranks, with the config's micro-batch, sharing what was traced."""
        deepspeed: dict[str, Any] = {
            **self.config.deepspeed,
            "train_micro_batch_size_per_gpu": self.batch.micro,
            "gradient_accumulation_steps": "auto",
            "train_batch_size": self.batch.micro * world if batch is None else batch,
        }
        other = Plan.__new__(Plan)
        other.__dict__.update(self.__dict__)
        other.config = self.config.model_copy(update={"deepspeed": deepspeed})
        other.world = world
        other.batch = solve_batch(deepspeed, world)
        return other
