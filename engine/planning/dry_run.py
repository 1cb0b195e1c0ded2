"""A run built as one rank of many, without the others, a GPU or memory: what it would be, and whether it would start.

The checks are those of `engine/train/build.py`, in its order. What cannot be known because a check failed (the classes of
annotations that are not there) is taken from the data set that the configs are written for, and said; so the first
failure is told together with everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from engine.config import BatchPlan, RunConfig
from engine.data.order import GlobalBatches
from engine.data.types import Classes
from engine.errors import ConfigError, UserError, first_line
from engine.modeling.build import build_model
from engine.modeling.detector import describe
from engine.modeling.weights import WeightsError
from engine.optim.attaching import attach
from engine.optim.registry import build_optimizer, sums_per_layer
from engine.optim.schedule import Schedule, build_schedule
from engine.planning.dry_report import say_layout, say_traffic, write_layout
from engine.planning.gathers import model_uses
from engine.planning.norms import synced_norms
from engine.planning.settings import refuse_sam, window_settings
from engine.planning.shards import parameters_of, plan_shards
from engine.planning.traffic import step_traffic
from engine.tasks.registry import task_of
from engine.train.build import check_supported, resolve
from engine.train.work_dir import check_new_work_dir
from engine.zero.engine import initialise_engine, read_layout
from engine.zero.fake_ranks import fake_ranks, on_meta, pretend_offloading
from engine.zero.processes import import_deepspeed
from engine.zero.settings import check_deepspeed, communication_settings, offload_device

T = TypeVar("T")
_OFFLOADS = ("offload_optimizer", "offload_param")


class NotKnown(UserError):
    """Something could not be checked, so that nobody can say that the run would start."""


class Verdict(NamedTuple):
    """What would stop the run, the first thing first, and what could not be checked."""

    stops: list[str]
    unknown: list[str]


class Failures:
    """What would stop the run, in the order in which it would, and what is not known."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.unknown: list[str] = []

    def attempt(self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        try:
            return check(*args, **kwargs)
        except UserError as error:
            told = self.unknown if isinstance(error, NotKnown) else self.reasons
            told.append(" ".join(str(error).splitlines()))
            return None


def dry_run(config: RunConfig, plan: BatchPlan, layout_file: Path | None = None) -> Verdict:
    """Print what the run would be, and write which rank holds how much of every module where a file is given."""
    first, then = Failures(), Failures()
    first.attempt(check_supported, config, resuming=False)
    work_dir = then.attempt(check_new_work_dir, config)
    config = resolve(config, plan, work_dir or Path(config.run.work_dir or "work_dirs"))
    classes, images = _data(config, then)
    print(
        f"batch   {plan.total} = {plan.micro} x {plan.accumulation} accumulated x {plan.world} ranks; "
        f"{plan.micro_batches} micro-batches an optimizer step",
        flush=True,
    )
    with fake_ranks(plan.world), on_meta():
        first.attempt(check_deepspeed, config.deepspeed)  # which wants to know the number of ranks
        model = then.attempt(_model, config, classes)
        then.attempt(_check_weights, config)
        if model is not None:
            _build(config, plan, model, images, then, layout_file)
    return Verdict(first.reasons + then.reasons, then.unknown)


def _data(config: RunConfig, failures: Failures) -> tuple[Classes, int]:
    built = failures.attempt(task_of(config).build_data)
    if built is not None:
        train, val, classes = built
        print(
            f"data    {len(train.dataset)} training and {len(val.dataset)} validation images, {len(classes.all)} classes"
        )
        return classes, len(train.dataset)
    usual = task_of(config).usual_data
    print(
        f"data    not read; as in {usual.source}, {usual.train} training images and {usual.things + usual.stuff} classes "
        "are assumed"
    )
    names = [f"class {k}" for k in range(1, usual.things + usual.stuff + 1)]
    ids = tuple(range(1, len(names) + 1))
    return Classes(tuple(names[: usual.things]), tuple(names[usual.things :]), ids), usual.train


def _check_weights(config: RunConfig) -> None:
    """That the file is there; whether it fits is seen when it is loaded."""
    path = config.detector.load_from
    if path is not None and not Path(path).exists():
        raise WeightsError(f"weight file {path} does not exist")


def _model(config: RunConfig, classes: Classes) -> nn.Module:
    # Built whole, for it takes no memory here; partitioned from the start it has the same shards.
    detector = config.detector.model_copy(update={"zero_init": False, "load_from": None})
    return build_model(task_of(config.model_copy(update={"detector": detector})), classes, empty=True)


def _build(
    config: RunConfig, plan: BatchPlan, model: nn.Module, images: int, failures: Failures, layout_file: Path | None
) -> None:
    batches = GlobalBatches(size=images, batch=plan.total, seed=config.run.seed)
    schedule = failures.attempt(build_schedule, config.schedule, batches.steps_per_epoch)
    warmup = schedule.warmup_steps if schedule is not None else 0
    optimizer = failures.attempt(build_optimizer, config.optimizer, model, warmup_steps=warmup)
    print(f"model   {describe(model)}; ZeRO-{config.zero_stage}", flush=True)
    if optimizer is None:
        return
    if schedule is not None:
        print(f"length  {schedule.steps} steps, {schedule.steps_per_epoch} an epoch, {warmup} of warm-up")
        failures.attempt(_check_windows, optimizer, schedule)
    # Before DeepSpeed puts its own tensors into the groups.
    parameters = parameters_of(model, optimizer.param_groups)
    uses, norms = model_uses(model), synced_norms(model)
    try:
        refuse_sam(config)
        settings = communication_settings(config.deepspeed, plan.world, plan.accumulation)
    except (UserError, ValueError) as error:
        print(f"traffic not planned: {error}")
        failures.attempt(_initialise, config, model, optimizer, None)
        return
    layout = plan_shards(parameters, settings.sharding)
    failures.attempt(_initialise, config, model, optimizer, layout)
    say_layout(layout, settings)
    if layout_file is not None:
        write_layout(layout, settings, layout_file)
    window = window_settings(config.optimizer.type, config.optimizer.params)
    say_traffic(
        step_traffic(
            parameters,
            settings,
            window=window,
            uses=uses,
            norms=norms,
            layer_numbers=sums_per_layer(config.optimizer.type),
        ),
        settings,
        window,
    )


def _check_windows(optimizer: Any, schedule: Schedule) -> None:
    modulator = getattr(optimizer, "modulator", None)
    if modulator is None:
        return
    first = (modulator.start_step // modulator.tau + 1) * modulator.tau
    if first > schedule.steps:
        raise ConfigError(
            f"AGVM's first window is step {first} (tau {modulator.tau}, after start_step "
            f"{modulator.start_step}) but the run has {schedule.steps} steps: lengthen it, or lower "
            "optimizer.params.tau or start_step"
        )
    windows = (schedule.steps - first) // modulator.tau + 1
    print(f"AGVM    windows: {windows}, from step {first} on, every {modulator.tau}; estimator {modulator.estimator}")


def _initialise(config: RunConfig, model: nn.Module, optimizer: Any, planned: Any) -> None:
    """DeepSpeed's own engine on this rank, whose shards have to be where they were planned."""
    keys = [key for key in _OFFLOADS if offload_device(config.deepspeed, key) != "none"]
    settings = _without_offloading(config.deepspeed, keys)
    # At stage 0 in half precision DeepSpeed 0.19.8 takes a step with zero gradients, for which data would be needed.
    optimizer.step = lambda closure=None: None
    try:
        engine = initialise_engine(model, optimizer, settings)
    except RuntimeError as error:  # an option of which DeepSpeed looks at the data
        raise NotKnown(
            f"DeepSpeed's engine cannot be built without storage ({first_line(error)}), so neither it nor what comes after "
            "it was checked: try the run for one step on two ranks"
        ) from error
    built = read_layout(engine)
    pretend_offloading(engine, config.deepspeed, keys)
    attach(config.optimizer, engine, optimizer, built)
    version = import_deepspeed().__version__
    if planned is not None and built.fragments != planned.fragments:
        raise ConfigError(
            f"DeepSpeed {version} lays out its shards in another way than engine/zero/geometry.py: use deepspeed 0.19.x"
        )
    print(
        f"engine  {type(engine.optimizer).__name__} of DeepSpeed {version}, as rank {built.rank} of "
        f"{built.world} on the meta device{' (its offloading left out)' if keys else ''}; its {len(built.fragments)} fragments "
        f"{'lie as planned' if planned is not None else 'were not planned'}",
        flush=True,
    )


def _without_offloading(deepspeed: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Offloaded state needs real memory; shards lie as without it. What DeepSpeed refuses of it is checked here."""
    zero = dict(deepspeed.get("zero_optimization", {}))
    for key in keys:
        asked = zero.pop(key)
        if asked["device"] == "nvme" and not asked.get("nvme_path"):
            raise ConfigError(f"zero_optimization.{key} to nvme has no nvme_path: give a folder on that disk")
    if "offload_optimizer" in keys and zero.get("stage", 0) in (1, 2) and not zero.get("compute_grad_norm", True):
        raise ConfigError(
            "DeepSpeed does not accept this config (zero_optimization.compute_grad_norm=false does not support "
            "optimizer offload)"
        )
    return {**deepspeed, "zero_optimization": zero}
