"""A run built as one rank of many, without the others, a GPU or memory: what it would be, and whether it would start.

The checks are those of `engine/building.py`, in its order. What cannot be known because a check failed (the classes of
annotations that are not there) is taken from the data set that the configs are written for, and said; so the first
failure is told together with everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from engine.building import build_model, check_deepspeed, check_supported, resolve, stage_of
from engine.config import BatchPlan, ConfigError, RunConfig, UserError
from engine.data.coco import Classes
from engine.data.order import GlobalBatches
from engine.detector import describe
from engine.optim.build import build_optimizer
from engine.optim.schedule import Schedule, build_schedule
from engine.planning.dry_report import say_layout, say_traffic, write_layout
from engine.planning.fake_ranks import fake_ranks, on_meta
from engine.planning.gathers import model_uses
from engine.planning.norms import synced_norms
from engine.planning.partition import parameters_of, plan_layout
from engine.planning.settings import communication_settings, layer_numbers, offload_device, refuse_sam, window_settings
from engine.planning.traffic import step_traffic
from engine.sam import SharpnessAware
from engine.task import task_of
from engine.weights import WeightsError
from engine.work_dir import check_new_work_dir

T = TypeVar("T")
# Of COCO (ADE20K for semantic, ImageNet for classification): training images, classes of objects, other classes.
_USUAL = {
    "detection": (117266, 80, 0),
    "instance": (117266, 80, 0),
    "panoptic": (118287, 80, 53),
    "semantic": (20210, 150, 0),
    "classification": (1281167, 1000, 0),
}


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
    first.attempt(check_supported, config, None)
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
    images, things, stuff = _USUAL[config.data.task]
    print(
        f"data    not read; as in the usual data set, {images} training images and {things + stuff} classes are assumed"
    )
    names = [f"class {k}" for k in range(1, things + stuff + 1)]
    return Classes(tuple(names[:things]), tuple(names[things:]), tuple(range(1, things + stuff + 1))), images


def _check_weights(config: RunConfig) -> None:
    """That the file is there; whether it fits is seen when it is loaded."""
    path = config.detector.load_from
    if path is not None and not Path(path).exists():
        raise WeightsError(f"weight file {path} does not exist")


def _model(config: RunConfig, classes: Classes) -> nn.Module:
    # Built whole, for it takes no memory here; partitioned from the start it has the same shards.
    detector = config.detector.model_copy(update={"zero_init": False, "load_from": None})
    return build_model(config.model_copy(update={"detector": detector}), classes, empty=True)


def _build(
    config: RunConfig, plan: BatchPlan, model: nn.Module, images: int, failures: Failures, layout_file: Path | None
) -> None:
    batches = GlobalBatches(size=images, batch=plan.total, seed=config.run.seed)
    schedule = failures.attempt(build_schedule, config.schedule, batches.steps_per_epoch)
    warmup = schedule.warmup_steps if schedule is not None else 0
    optimizer = failures.attempt(build_optimizer, config.optimizer, model, warmup_steps=warmup)
    print(f"model   {describe(model)}; ZeRO-{stage_of(config)}", flush=True)
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
    layout = plan_layout(parameters, settings.sharding)
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
            layer_numbers=layer_numbers(config.optimizer.type),
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
    import deepspeed

    from engine.zero.layout import layout_of
    from engine.zero.module_trace import parameters_only

    keys = [key for key in _OFFLOADS if offload_device(config.deepspeed, key) != "none"]
    settings = _without_offloading(config.deepspeed, keys)
    # At stage 0 in half precision DeepSpeed 0.19.8 takes a step with zero gradients, for which data would be needed.
    optimizer.step = lambda closure=None: None
    try:
        with parameters_only():
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"DeepSpeed does not accept this config ({_first_line(error)})") from error
    except RuntimeError as error:  # an option of which DeepSpeed looks at the data
        raise NotKnown(
            f"DeepSpeed's engine cannot be built without storage ({_first_line(error)}), so neither it nor what "
            "comes after it was checked: try the run for one step on two ranks"
        ) from error
    try:
        built = layout_of(engine)
        _attach(config, engine, optimizer, built, keys)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if planned is not None and built.fragments != planned.fragments:
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} lays out its shards in another way than "
            "engine/planning/partition.py: use deepspeed 0.19.x"
        )
    print(
        f"engine  {type(engine.optimizer).__name__} of DeepSpeed {deepspeed.__version__}, as rank {built.rank} of "
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


def _attach(config: RunConfig, engine: Any, optimizer: Any, layout: Any, offloads: list[str]) -> None:
    """As `engine/building.py` does, with what was left out to build the engine written back: it may be refused."""
    asked = engine._config.zero_config.model_validate(config.deepspeed.get("zero_optimization", {}))
    for key in offloads:
        setattr(engine._config.zero_config, key, getattr(asked, key))
    if hasattr(optimizer, "attach"):
        size = config.optimizer.params.get("bucket_size")
        optimizer.attach(engine, **({} if size is None else {"bucket_size": size}))
    if config.optimizer.sam is not None:
        SharpnessAware(engine, optimizer, layout, config.optimizer.sam.rho)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
