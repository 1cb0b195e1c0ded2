"""The plan of a run: its model as shapes, traced once for each size that is asked for, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch import nn

from engine.config import BatchPlan, RunConfig, solve_batch
from engine.errors import ConfigError, UserError
from engine.modeling.precision import Precision
from engine.optim.registry import build_optimizer, count_moments, sums_per_layer
from engine.planning.gathers import model_uses
from engine.planning.image_sizes import ImageSizes, Size
from engine.planning.known_data import known_data, planned_classes
from engine.planning.memory import OFFLOADS, Memory, plan_memory
from engine.planning.settings import refuse_sam, stage_refused, window_settings
from engine.planning.shape_model import build_shape_model
from engine.planning.shards import Parameter, parameters_of
from engine.planning.step_trace import StepTrace, trace_model
from engine.planning.traffic import Collective, step_traffic
from engine.zero.fake_ranks import fake_ranks
from engine.zero.recording import Use
from engine.zero.settings import CommunicationSettings, check_deepspeed, communication_settings, offload_device

BACKBONE = ["backbone"]  # what is recomputed where the config does not say


class Plan:
    """Everything is worked out when first asked for. `world` may be changed by `at`, which shares the traces."""

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
        if world < 1:
            raise UserError(f"--world-size must be a whole number >= 1, got {world}")
        if objects < 1:
            raise UserError(f"--objects must be a whole number >= 1, got {objects}")
        refuse_sam(config)
        self.config, self.world, self.objects = config, world, objects
        if stage_refused(config, self.stage):
            raise ConfigError(
                f"{config.optimizer.type} does not support fp16 at ZeRO stage 0: set zero_optimization.stage to "
                "1, 2 or 3, or use bf16"
            )
        self.batch: BatchPlan = solve_batch(config.deepspeed, world)
        with fake_ranks(world):  # which DeepSpeed asks for their number
            check_deepspeed({**config.deepspeed, **self.batch.as_keys()})
        self.settings()  # which reads what DeepSpeed does not at first
        self.data = known_data(config, images=images, classes=classes)
        self.sizes = ImageSizes(config.data, self.batch.micro, fixed=fixed_size)
        self._traces: dict[tuple, StepTrace] = {}
        self._traffic: dict[CommunicationSettings, list[Collective]] = {}
        self.parameters: list[Parameter] = []
        self.uses: list[Use] = []
        self.buffers = 0

    @property
    def recomputed(self) -> bool:
        return bool(self.config.detector.checkpoint_activations)

    @property
    def steps(self) -> int:
        schedule = self.config.schedule
        return schedule.steps if schedule.steps is not None else max(1, round(schedule.epochs * self.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.data.train // self.batch.total)

    def trace(self, size: Size, *, recompute: bool | None = None) -> StepTrace:
        """A micro-step at a size, with or without activation checkpointing (as the config has it)."""
        recompute = self.recomputed if recompute is None else recompute
        key = (size, recompute, self.batch.micro)
        if key not in self._traces:
            config = self._with_recomputation(recompute)
            classes = planned_classes(self.data)
            # Batch norm over all ranks keeps other tensors than over one; more than two make no difference.
            with fake_ranks(min(self.world, 2)):
                model, mode = build_shape_model(config, classes)
                if not self.parameters or recompute == self.recomputed:
                    self._describe(model)
                self._traces[key] = trace_model(
                    model,
                    mode,
                    config,
                    classes,
                    micro=self.batch.micro,
                    height=size.height,
                    width=size.width,
                    objects=self.objects,
                )
        return self._traces[key]

    def _with_recomputation(self, recompute: bool) -> RunConfig:
        names = (self.config.detector.checkpoint_activations or BACKBONE) if recompute else []
        detector = self.config.detector.model_copy(update={"checkpoint_activations": names})
        return self.config.model_copy(update={"detector": detector})

    def _describe(self, model: nn.Module) -> None:
        optimizer = build_optimizer(self.config.optimizer, model, warmup_steps=0)
        self.parameters = parameters_of(model, optimizer.param_groups)
        self.uses = model_uses(model)
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())

    def settings(self, stage: int | None = None) -> CommunicationSettings:
        deepspeed = dict(self.config.deepspeed)
        if stage is not None:
            deepspeed["zero_optimization"] = {**deepspeed.get("zero_optimization", {}), "stage": stage}
        return communication_settings(deepspeed, self.world, self.batch.accumulation)

    def traffic(self, settings: CommunicationSettings, order: Sequence[int]) -> list[Collective]:
        """Every collective of a step and of a window, but those of batch norms, which are in the trace."""
        if settings not in self._traffic:
            window = window_settings(self.config.optimizer.type, self.config.optimizer.params)
            self._traffic[settings] = step_traffic(
                self.parameters,
                settings,
                window=window,
                uses=self.uses,
                order=order,
                layer_numbers=sums_per_layer(self.config.optimizer.type),
            )
        return self._traffic[settings]

    def memory(
        self,
        stage: int | None = None,
        *,
        offload: str | None = None,
        recompute: bool | None = None,
        window: bool = True,
    ) -> Memory:
        """At the largest images, by default at the config's own stage and offloading."""
        trace = self.trace(self.sizes.largest, recompute=recompute)
        kind, params = self.config.optimizer.type, self.config.optimizer.params
        settings = self.settings(stage)
        return plan_memory(
            trace,
            self.parameters,
            settings,
            moments=self.moments,
            window=window_settings(kind, params) if window else None,
            offload=self.offload if offload is None else offload,
            buffers=self.buffers,
            uses=self.uses,
            average=self.config.run.ema is not None,
        )

    @property
    def stage(self) -> int:
        return self.config.deepspeed.get("zero_optimization", {}).get("stage", 0)

    @property
    def offload(self) -> str:
        if offload_device(self.config.deepspeed, "offload_param") != "none":
            return OFFLOADS[2]
        return OFFLOADS[1] if offload_device(self.config.deepspeed, "offload_optimizer") != "none" else OFFLOADS[0]

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
        other.__dict__.update({key: value for key, value in self.__dict__.items() if key != "dtype"})
        other.config = self.config.model_copy(update={"deepspeed": deepspeed})
        other.world = world
        other.batch = solve_batch(deepspeed, world)
        return other
