"""Build a run from its config: data, model, optimizer, DeepSpeed's engine, and the step it starts at."""

from __future__ import annotations

import time
from pathlib import Path

from torch import nn

from engine import distributed
from engine.checkpoints.compare import check_config
from engine.checkpoints.finding import Checkpoint
from engine.checkpoints.reading import load_weights
from engine.checkpoints.restoring import restore, take_over
from engine.config import BatchPlan, RunConfig, solve_batch
from engine.data.coco import landscape_flags
from engine.data.order import GlobalBatches
from engine.distributed import say
from engine.errors import ConfigError, first_of
from engine.files import CONFIG, write_json
from engine.modeling.build import build_model
from engine.modeling.detector import describe, dropped_weights
from engine.modeling.kernels import use_tf32
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from engine.modeling.start_weights import start_warnings
from engine.monitoring.live import LiveLine
from engine.optim.agvm import AGVMOptimizer
from engine.optim.attaching import attach
from engine.optim.ema import ShardEMA
from engine.optim.modules import describe_modules, detector_modules
from engine.optim.registry import build_optimizer
from engine.optim.schedule import build_schedule
from engine.recipes.filling import explain
from engine.tasks.coco_scores import coco_backend
from engine.tasks.registry import task_of
from engine.train.forward import TrainingForward
from engine.train.run import Run
from engine.train.work_dir import Resume, open_work_dir
from engine.zero.engine import initialise_engine, read_layout
from engine.zero.monitors import check_monitors
from engine.zero.processes import import_deepspeed, set_timeout
from engine.zero.settings import check_deepspeed, offload_device
from engine.zero.whole_parameters import keep_whole


def build_run(config: RunConfig, resume: Resume | None = None) -> Run:
    """Build everything, at step 0 or at a checkpoint's step. A UserError of one rank is raised on all ranks."""
    import_deepspeed()
    set_timeout(config.run.timeout_minutes)
    with distributed.together():
        plan = solve_batch(config.deepspeed, distributed.world_size())
        check_supported(config, resuming=resume is not None)
        check_deepspeed({**config.deepspeed, **plan.as_keys()})
        check_monitors(config.deepspeed, writes=distributed.rank() == 0)
        task_of(config).check()
    with distributed.together():
        work_dir, checkpoint = open_work_dir(config, resume)
    config = resolve(config, plan, work_dir)
    if checkpoint is not None:
        config = _compared(config, checkpoint)
    with distributed.together():
        if distributed.rank() == 0:
            write_json(work_dir / CONFIG, config.to_json(), indent=2)
    _say_config(config, work_dir)
    task = task_of(config)
    with distributed.together():
        train, val, classes = task.build_data()
    with distributed.together():
        model = build_model(
            task, classes, load=lambda model: _load_weights(config, model, resuming=checkpoint is not None)
        )
        landscape = landscape_flags(train.dataset) if config.data.group_by_aspect else None
        batches = GlobalBatches(
            size=len(train.dataset), batch=plan.total, seed=config.run.seed, micro=plan.micro, landscape=landscape
        )
        schedule = build_schedule(config.schedule, batches.steps_per_epoch)
        optimizer = build_optimizer(config.optimizer, model, warmup_steps=schedule.warmup_steps)
    if isinstance(optimizer, AGVMOptimizer):
        modules = config.optimizer.params.get("modules") or detector_modules(model)
        say(f"agvm    {describe_modules(optimizer.param_groups, modules)}; optimizer.params.modules changes them")
    precision, device = Precision.of(config.deepspeed), distributed.device()
    tf32 = use_tf32(config.detector.tf32, device)
    if tf32:
        say(f"tf32    {tf32}")
    preprocess = Preprocessor(model, device, precision)
    forward = TrainingForward(model, preprocess, precision, device, over_ranks=config.detector.normaliser == "ranks")
    model.forward = forward
    engine = initialise_engine(model, optimizer, config.deepspeed)
    with distributed.together():
        layout = read_layout(engine)
    with distributed.together():
        keep_whole(engine, config.detector.skippable)
    sam = attach(config.optimizer, engine, optimizer, layout)
    forward.gradients.observer = getattr(optimizer, "observer", None)
    run = Run(
        config=config,
        task=task,
        plan=plan,
        classes=classes,
        train=train,
        val=val,
        schedule=schedule,
        batches=batches,
        engine=engine,
        optimizer=optimizer,
        forward=forward,
        preprocess=preprocess,
        precision=precision,
        work_dir=work_dir,
        layout=layout,
        ema=None if config.run.ema is None else ShardEMA(layout, config.run.ema),
        sam=sam,
    )
    _say_run(run, model)
    if checkpoint is not None:
        resume_from(run, checkpoint)
    return run


def resolve(config: RunConfig, plan: BatchPlan, work_dir: Path) -> RunConfig:
    """The config as it runs: with all batch sizes, and with explicit values for DeepSpeed's silent defaults."""
    settings = {
        **config.deepspeed,
        **plan.as_keys(),
        # DeepSpeed's default is 1.0, which would surprise anyone who leaves the key out.
        "gradient_clipping": config.deepspeed.get("gradient_clipping", 0.0),
        "zero_allow_untested_optimizer": config.deepspeed.get("zero_allow_untested_optimizer", True),
        "zero_force_ds_cpu_optimizer": config.deepspeed.get("zero_force_ds_cpu_optimizer", False),
    }
    run = config.run.model_copy(update={"work_dir": str(work_dir)})
    return config.model_copy(update={"deepspeed": settings, "run": run})


def check_supported(config: RunConfig, *, resuming: bool) -> None:
    stage = config.zero_stage
    zero = config.deepspeed.get("zero_optimization", {})
    devices = [offload_device(config.deepspeed, key) for key in ("offload_optimizer", "offload_param")]
    if "nvme" in devices and (config.run.checkpoint_interval != 0 or config.run.ema is not None or resuming):
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
        coco_backend(config.run.eval_backend)  # fails now if it is not installed, not after the first epoch
    if config.detector.zero_init and stage != 3:
        raise ConfigError(f"detector.zero_init needs zero_optimization.stage 3, got {stage}")


def _compared(config: RunConfig, checkpoint: Checkpoint) -> RunConfig:
    """Print how the config differs from the checkpoint's, and drop load_from: the checkpoint has the weights."""
    with distributed.together():
        changed = check_config(checkpoint.meta["config"], config.to_json())
    for line in changed:
        say(f"config  {line}")
    return config.model_copy(update={"detector": config.detector.model_copy(update={"load_from": None})})


def _load_weights(config: RunConfig, model: nn.Module, *, resuming: bool) -> None:
    detector = config.detector
    filled: list[str] = []
    if detector.load_from:
        report = load_weights(model, detector.load_from, drop_mismatched=detector.drop_mismatched)
        say(f"weights {report}")
        filled = report.matched
    if not resuming:  # a checkpoint fills everything
        dropped = [] if config.data.task == "classification" else dropped_weights(detector)
        for line in start_warnings(model, dropped, filled):
            say(f"WARNING {line}")


def _say_config(config: RunConfig, work_dir: Path) -> None:
    if distributed.rank() == 0:
        say(f"config  {work_dir / CONFIG}")
        for key, value in config.to_json().items():
            say(f"  {key}: {value}")
        for line in explain(config):
            say(line)


def _say_run(run: Run, model: nn.Module) -> None:
    plan, schedule, names = run.plan, run.schedule, run.classes.all
    say(f"model   {describe(model)}")
    say(
        f"data    {len(run.train.dataset)} training and {len(run.val.dataset)} validation images, "
        f"{len(names)} classes: {first_of(names, 8)}"
    )
    say(
        f"batch   {plan.total} = {plan.micro} x {plan.accumulation} accumulated x {plan.world} ranks; "
        f"{schedule.steps} steps, {schedule.steps_per_epoch} an epoch, {schedule.warmup_steps} of warm-up; "
        f"ZeRO-{run.stage}, {str(run.precision.dtype)[6:]}"
    )


def resume_from(run: Run, checkpoint: Checkpoint) -> None:
    """Restore the run's state from a checkpoint, and the records in the work dir."""
    began = time.monotonic()
    total = sum(f.stop - f.start for f in run.layout.held())
    line = LiveLine(total=total, label="resume", interval=max(1, total), enabled=distributed.rank() == 0)
    restore(run.state(), checkpoint, progress=line.advance)
    line.close()
    run.start = checkpoint.step
    with distributed.together():
        if distributed.rank() == 0:
            take_over(run.work_dir, checkpoint, keep_best=run.config.run.keep_best, say=say)
    say(
        f"resume  {checkpoint.folder} ({checkpoint.describe}), step {run.start} of {run.schedule.steps}, "
        f"{time.monotonic() - began:.1f} s"
    )
