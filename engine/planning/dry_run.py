"""A run built as one rank of many, without the others, a GPU or memory: what it would be, and whether it would start.

The checks are those of `engine/train/build.py`, in its order. What cannot be known because a check failed (the classes
of missing annotations) is taken from the task's usual data set, and the output says so; so the rest is printed too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from engine.config import BatchPlan, RunConfig
from engine.data.order import GlobalBatches
from engine.data.types import Classes
from engine.errors import ConfigError, UserError, first_line
from engine.files import write_json
from engine.modeling.detector import describe
from engine.modeling.weights import WeightsError
from engine.optim.attaching import attach
from engine.optim.registry import build_optimizer
from engine.optim.schedule import Schedule, build_schedule
from engine.planning.known_data import planned_classes
from engine.planning.model_facts import PlannedShards, model_facts, plan_shards, refuse_sam
from engine.planning.step_trace import build_empty_model
from engine.planning.traffic import Collective, step_traffic
from engine.tasks.registry import task_of
from engine.train.build import check_supported, resolve
from engine.train.work_dir import check_new_work_dir
from engine.zero.engine import initialise_engine, read_layout
from engine.zero.fake_ranks import fake_ranks, on_meta, pretend_offloading
from engine.zero.monitors import check_monitors
from engine.zero.processes import import_deepspeed
from engine.zero.settings import CommunicationSettings, check_deepspeed, communication_settings, offload_device

T = TypeVar("T")
_OFFLOADS = ("offload_optimizer", "offload_param")
_HOLDS = (
    "all of it on every rank",
    "optimizer state",
    "optimizer state and gradients",
    "weights, gradients and optimizer state",
)


class NotKnown(UserError):
    """Something could not be checked, so nobody can say whether the run would start."""


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


def dry_run(config: RunConfig, plan: BatchPlan, layout_file: Path | None = None) -> tuple[list[str], list[str]]:
    """Print what the run would be. Return what would stop it, the first thing first, and what could not be checked."""
    failures = Failures()
    failures.attempt(check_supported, config, resuming=False)
    with fake_ranks(plan.world), on_meta():  # because DeepSpeed asks for the number of ranks and their device
        failures.attempt(check_deepspeed, {**config.deepspeed, **plan.as_keys()})
    failures.attempt(check_monitors, config.deepspeed, writes=False)
    failures.attempt(task_of(config).check)
    work_dir = failures.attempt(check_new_work_dir, config)
    config = resolve(config, plan, work_dir or Path(config.run.work_dir or "work_dirs"))
    classes, images = _data(config, failures)
    batch = f"{plan.total} = {plan.micro} x {plan.accumulation} accumulated x {plan.world} ranks"
    print(f"batch   {batch}; {plan.micro_batches} micro-batches an optimizer step", flush=True)
    with fake_ranks(plan.world), on_meta():
        model = failures.attempt(build_empty_model, config, classes)
        failures.attempt(_check_weights, config)
        if model is not None:
            _build(config, plan, model, images, failures, layout_file)
    return failures.reasons, failures.unknown


def _data(config: RunConfig, failures: Failures) -> tuple[Classes, int]:
    task = task_of(config)
    built = failures.attempt(task.build_data)
    if built is not None:
        train, val, classes = built
        counts = f"{len(train.dataset)} training and {len(val.dataset)} validation images"
        print(f"data    {counts}, {len(classes.all)} classes")
        return classes, len(train.dataset)
    usual = task.usual_data
    counts = f"{usual.train} training images and {usual.things + usual.stuff} classes"
    print(f"data    not read; as in {usual.source}, {counts} are assumed")
    return planned_classes(usual), usual.train


def _check_weights(config: RunConfig) -> None:
    """That the file is there; whether it fits is seen when it is loaded."""
    path = config.detector.load_from
    if path is not None and not Path(path).exists():
        raise WeightsError(f"weight file {path} does not exist")


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
    facts = model_facts(model, optimizer, config)
    try:
        refuse_sam(config)
        settings = communication_settings(config.deepspeed, plan.world, plan.accumulation)
    except (UserError, ValueError) as error:
        print(f"traffic not planned: {error}")
        failures.attempt(_initialise, config, model, optimizer, None)
        return
    shards = plan_shards(facts.parameters, settings.sharding)
    failures.attempt(_initialise, config, model, optimizer, shards)
    _say_shards(shards, settings)
    if layout_file is not None:
        held = dict(holds=_HOLDS[settings.stage], elements=shards.held_elements())
        write_json(layout_file, dict(stage=settings.stage, world=plan.world, **held))
        print(f"layout  of {plan.world} ranks written to {layout_file}")
    if plan.world == 1:
        print("traffic none on one rank")
        return
    traffic, dtype = step_traffic(facts, settings), settings.communication_dtype
    print(f"traffic of a plain step (payload of all calls, and what a rank sends in a ring); {dtype} gradients")
    _say_traffic([c for c in traffic if "window" not in c.when], settings)
    if facts.window is not None:
        print(f"traffic that an AGVM window adds ({facts.window.kind})")
        _say_traffic([c for c in traffic if c.when == "window"], settings)
        more = sum(c.calls * c.bytes for c in traffic if c.when == "first window")
        print(f"  the first window sends {byte_text(more)} more to check itself")


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


def _initialise(config: RunConfig, model: nn.Module, optimizer: Any, planned: PlannedShards | None) -> None:
    """DeepSpeed's own engine on this rank. Its shards must be where they were planned."""
    keys = [key for key in _OFFLOADS if offload_device(config.deepspeed, key) != "none"]
    settings = _without_offloading(config.deepspeed, keys)
    # At stage 0 in half precision DeepSpeed 0.19.8 takes a step with zero gradients, for which data would be needed.
    optimizer.step = lambda closure=None: None
    try:
        engine = initialise_engine(model, optimizer, settings)
    except RuntimeError as error:  # an option for which DeepSpeed reads the data of tensors
        raise NotKnown(
            f"DeepSpeed's engine cannot be built without storage ({first_line(error)}), so neither it nor what comes "
            "after it was checked: try the run for one step on two ranks"
        ) from error
    built = read_layout(engine)
    pretend_offloading(engine, config.deepspeed, keys)
    attach(config.optimizer, engine, optimizer, built)
    version = import_deepspeed().__version__
    if planned is not None and built.fragments != planned.geometry.fragments:
        raise ConfigError(
            f"DeepSpeed {version} lays out its shards in another way than engine/zero/geometry.py: use deepspeed 0.19.x"
        )
    print(
        f"engine  {type(engine.optimizer).__name__} of DeepSpeed {version}, as rank {built.rank} of {built.world} on "
        f"the meta device{' (its offloading left out)' if keys else ''}; its {len(built.fragments)} fragments "
        f"{'lie as planned' if planned is not None else 'were not planned'}",
        flush=True,
    )


def _without_offloading(deepspeed: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Offloaded state needs real memory, and shards are the same without it. DeepSpeed's refusals are checked here."""
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


def byte_text(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _say_shards(shards: PlannedShards, settings: CommunicationSettings) -> None:
    """In bytes of fp32 elements."""
    print(
        f"shards  ZeRO-{settings.stage}: {_HOLDS[settings.stage]}; fp32 bytes {'of' if settings.stage else 'on all of'}"
        f" {settings.world} ranks, {byte_text(4 * shards.geometry.padding())} of padding in all"
    )
    print(f"  {'module':<22}{'in all':>11}{'least':>11}{'mean':>11}{'most':>11}{'empty ranks':>13}")
    for module, *counts, empty in shards.module_shares():
        print(f"  {module:<22}" + "".join(f"{byte_text(4 * count):>11}" for count in counts) + f"{empty:>13}")


def _say_traffic(collectives: Iterable[Collective], settings: CommunicationSettings) -> None:
    """Calls, payload and sent bytes of one optimizer step, by purpose and operation."""
    calls, payload, sent = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for c in collectives:
        times, line = c.times(settings.accumulation, window=True), f"{c.purpose:<22}{c.op:<16}"
        calls[line] += times
        payload[line] += times * c.bytes
        sent[line] += times * c.sent(settings.world)
    print(f"  {'what':<22}{'collective':<16}{'calls':>7}{'payload':>12}{'sent':>12}{'bytes':>16}")
    rows = [(line, calls[line], payload[line], sent[line]) for line in calls]
    for line, number, size, out in [*rows, (f"{'in all':<38}", calls.total(), payload.total(), sum(sent.values()))]:
        print(f"  {line}{number:>7}{byte_text(size):>12}{byte_text(out):>12}{size:>16}", flush=True)
