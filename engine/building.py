"""A run from its config: data, model, optimizer, DeepSpeed's engine, and where it begins."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import distributed
from engine.activation_checkpointing import checkpoint_blocks
from engine.checkpoints.compare import check_config
from engine.checkpoints.finding import Checkpoint
from engine.checkpoints.resuming import restore, take_over
from engine.config import BatchPlan, ConfigError, RunConfig, solve_batch
from engine.config.recipe import explain
from engine.data.build import Split
from engine.data.coco import Classes, landscape_flags
from engine.data.order import GlobalBatches
from engine.detector import describe, loss_in_fp32
from engine.ema import ShardEMA
from engine.evaluation import coco_backend
from engine.forward import Precision, Preprocessor, TrainingForward
from engine.monitoring.live import LiveLine
from engine.monitoring.records import write_json
from engine.optim.build import build_optimizer
from engine.optim.schedule import Schedule, build_schedule
from engine.randomness import BUILD, seed_all
from engine.sam import SharpnessAware
from engine.task import Task, task_of
from engine.weights import load_weights
from engine.work_dir import Resume, open_work_dir
from engine.zero.layout import Layout, layout_of
from engine.zero.module_trace import parameters_only
from engine.zero.partitioned_build import initialise, partitioned
from engine.zero.scalars import give_dimensions
from engine.zero.whole_parameters import keep_whole, whole_state


@dataclass(kw_only=True)
class Run:
    """Everything a run is made of, built once."""

    config: RunConfig
    task: Task
    plan: BatchPlan
    classes: Classes
    train: Split
    val: Split
    schedule: Schedule
    batches: GlobalBatches
    engine: Any  # DeepSpeed's
    optimizer: torch.optim.Optimizer
    forward: TrainingForward
    preprocess: Preprocessor
    precision: Precision
    work_dir: Path
    layout: Layout  # where master weights and optimizer state live on this rank
    stage: int
    ema: ShardEMA | None = None
    sam: SharpnessAware | None = None
    start: int = 0  # optimizer steps done before this process began
    loss_names: list[str] | None = None
    lost_record: str | None = None  # why a record could not be written, on rank 0


def stage_of(config: RunConfig) -> int:
    return config.deepspeed.get("zero_optimization", {}).get("stage", 0)


def resolve(config: RunConfig, plan: BatchPlan, work_dir: Path) -> RunConfig:
    """The config as it runs: the batch triangle solved, and what DeepSpeed would assume in silence written down."""
    settings = {
        **config.deepspeed,
        **plan.as_keys(),
        # DeepSpeed's own default is 1.0; nobody who leaves the key out means that.
        "gradient_clipping": config.deepspeed.get("gradient_clipping", 0.0),
        "zero_allow_untested_optimizer": config.deepspeed.get("zero_allow_untested_optimizer", True),
        "zero_force_ds_cpu_optimizer": config.deepspeed.get("zero_force_ds_cpu_optimizer", False),
    }
    run = config.run.model_copy(update={"work_dir": str(work_dir)})
    return config.model_copy(update={"deepspeed": settings, "run": run})


def build_run(config: RunConfig, resume: Resume | None = None) -> Run:
    """Build everything, at step 0 or at a checkpoint's; any UserError is raised alike on all ranks."""
    deepspeed = distributed.import_deepspeed()
    rank = distributed.rank()
    with distributed.together():
        plan = solve_batch(config.deepspeed, distributed.world_size())
        check_supported(config, resume)
        check_deepspeed({**config.deepspeed, **plan.as_keys()})
    with distributed.together():
        work_dir, checkpoint = open_work_dir(config, resume)
    config = resolve(config, plan, work_dir)
    if checkpoint is not None:
        with distributed.together():
            changed = check_config(checkpoint.meta["config"], config.to_json())
        # Its weights will come from the checkpoint.
        config = config.model_copy(update={"detector": config.detector.model_copy(update={"load_from": None})})
        for line in changed:
            say(f"config  {line}")
    with distributed.together():
        if rank == 0:
            write_json(work_dir / "config.json", config.to_json(), indent=2)
    if rank == 0:
        say(f"config  {work_dir / 'config.json'}")
        for key, value in config.to_json().items():
            say(f"  {key}: {value}")
        for line in explain(config):
            say(line)
    task = task_of(config)
    with distributed.together():
        train, val, classes = task.build_data()
    with distributed.together():
        model = build_model(config, classes)
        batches = GlobalBatches(
            size=len(train.dataset),
            batch=plan.total,
            seed=config.run.seed,
            landscape=landscape_flags(train.dataset) if config.data.group_by_aspect else None,
        )
        schedule = build_schedule(config.schedule, batches.steps_per_epoch)
        optimizer = build_optimizer(config.optimizer, model, warmup_steps=schedule.warmup_steps)
    precision = Precision.of(config.deepspeed)
    device = distributed.device()
    preprocess = Preprocessor(model, device, precision)
    forward = TrainingForward(model, preprocess, precision, device)
    model.forward = forward
    try:
        with parameters_only():
            model_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=dict(config.deepspeed))
    except (AssertionError, ValueError) as error:  # some combinations are only refused once the model is known
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"DeepSpeed does not accept this config ({reason})") from error
    with distributed.together():
        layout = _layout(model_engine)
    with distributed.together():
        keep_whole(model_engine, config.detector.skippable)
    if hasattr(optimizer, "attach"):
        try:
            size = config.optimizer.params.get("bucket_size")
            optimizer.attach(model_engine, **({} if size is None else {"bucket_size": size}))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    try:
        options = config.optimizer.sam
        sam = None if options is None else SharpnessAware(model_engine, optimizer, layout, options.rho)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    say(f"model   {describe(model)}")
    say(
        f"data    {len(train.dataset)} training and {len(val.dataset)} validation images, "
        f"{len(classes.all)} classes: {', '.join(classes.all[:8])}{', ...' if len(classes.all) > 8 else ''}"
    )
    say(
        f"batch   {plan.total} = {plan.micro} x {plan.accumulation} accumulated x {plan.world} ranks; "
        f"{schedule.steps} steps, {batches.steps_per_epoch} an epoch, {schedule.warmup_steps} of warm-up; "
        f"ZeRO-{stage_of(config)}, {str(precision.dtype)[6:]}"
    )
    run = Run(
        config=config,
        task=task,
        plan=plan,
        classes=classes,
        train=train,
        val=val,
        schedule=schedule,
        batches=batches,
        engine=model_engine,
        optimizer=optimizer,
        forward=forward,
        preprocess=preprocess,
        precision=precision,
        work_dir=work_dir,
        layout=layout,
        stage=stage_of(config),
        ema=None if config.run.ema is None else ShardEMA(layout, config.run.ema),
        sam=sam,
    )
    if checkpoint is not None:
        go_on(run, checkpoint)
    return run


def go_on(run: Run, checkpoint: Checkpoint) -> None:
    """Carry a checkpoint into the run, and its records into the work dir."""
    began = time.monotonic()
    total = sum(f.stop - f.start for f in run.layout.held())
    line = LiveLine(total=total, label="resume", interval=max(1, total), enabled=distributed.rank() == 0)
    restore(run, checkpoint, progress=line.advance)
    line.close()
    run.start = checkpoint.step
    with distributed.together():
        if distributed.rank() == 0:
            take_over(run, checkpoint, say)
    say(
        f"resume  {checkpoint.folder} ({checkpoint.describe}), step {run.start} of {run.schedule.steps}, "
        f"{time.monotonic() - began:.1f} s"
    )


def _layout(model_engine: Any) -> Layout:
    try:
        return layout_of(model_engine)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_deepspeed(settings: dict[str, Any]) -> None:
    """Let DeepSpeed read its own keys before anything is built, and name the one it does not take."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f'DeepSpeed does not accept "{".".join(str(part) for part in first["loc"])}" in '
            f"{error.title.removeprefix('DeepSpeed').removesuffix('Config').lower()} ({first['msg']})"
        ) from None
    except Exception as error:  # its readers raise whatever a wrong value leads to
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"DeepSpeed does not accept this config ({type(error).__name__}: {reason})") from None


def check_supported(config: RunConfig, resume: Resume | None) -> None:
    stage = stage_of(config)
    zero = config.deepspeed.get("zero_optimization", {})
    if "nvme" in str(zero) and (
        config.run.checkpoint_interval != 0 or config.run.ema is not None or resume is not None
    ):
        raise ConfigError(
            "state that is offloaded to NVMe can be neither saved nor averaged: set run.checkpoint_interval to "
            "0 and run.ema to null, or offload to the CPU"
        )
    if zero.get("elastic_checkpoint"):
        raise ConfigError(
            "zero_optimization.elastic_checkpoint is refused: checkpoints fit any number of ranks without it"
        )
    if config.deepspeed.get("checkpoint", {}).get("use_node_local_storage"):
        raise ConfigError("checkpoint.use_node_local_storage is refused: the work dir must be one folder for all nodes")
    if config.optimizer.type == "Adagrad" and stage > 0:
        raise ConfigError("DeepSpeed replaces Adagrad under ZeRO by one that knows no schedule: use another optimizer")
    if config.run.eval_interval != 0:
        coco_backend(config.run.eval_backend)  # not after the first epoch
    if config.detector.zero_init and stage != 3:
        raise ConfigError(f"detector.zero_init needs zero_optimization.stage 3, got {stage}")


def build_model(config: RunConfig, classes: Classes, *, empty: bool = False) -> nn.Module:
    """The model with its weights: initialised from the seed, then loaded from a file if one is named.

    `empty` leaves the weights to the caller.
    """
    from models.batch_norm import convert_batch_norm

    task, detector = task_of(config), config.detector
    seed_all(config.run.seed, BUILD)
    with partitioned(dict(config.deepspeed)) if detector.zero_init else contextlib.nullcontext():
        model = task.build_model(classes)
    model.data_preprocessor = task.build_preprocessor(classes)  # outside zero.Init, which would round its means
    seed_all(config.run.seed, BUILD, 1)  # zero.Init draws numbers of its own while building
    if not empty:
        initialise(model)
    if detector.load_from and not empty:
        say(f"weights {load_weights(model, detector.load_from, drop_mismatched=detector.drop_mismatched)}")
    give_dimensions(model)
    precision = Precision.of(config.deepspeed)
    if detector.sync_bn or precision.half:
        try:
            convert_batch_norm(model, synchronise=detector.sync_bn)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if precision.half:
        loss_in_fp32(model)
    if detector.checkpoint_activations:
        checkpoint_blocks(model, detector.checkpoint_activations)
    return model.train()


def plain_model(run: Run) -> nn.Module:
    """A model that any rank may run alone. Under ZeRO-3 this is a whole copy: a partitioned one would wait for the
    others at every layer, and in evaluation ranks see different numbers of images and objects."""
    if run.stage != 3:
        return run.engine.module
    whole = run.config.model_copy(update={"detector": run.config.detector.model_copy(update={"zero_init": False})})
    copy = build_model(whole, run.classes, empty=True).to(run.precision.dtype).to(distributed.device())
    target = copy.state_dict()
    for name, value in whole_state(run.engine.module):
        target[name].copy_(value)
    return copy


def say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)
