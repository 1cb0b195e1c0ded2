"""A run from its config to its records: build, initialise DeepSpeed, loop, evaluate, report."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import nn

from engine import distributed
from engine.activation_checkpointing import checkpoint_blocks
from engine.config import BatchPlan, ConfigError, RunConfig, UserError, solve_batch
from engine.data.build import Split
from engine.data.coco import Classes, DataError, landscape_flags
from engine.data.loader import training_loader
from engine.data.mmdet_coco import Unreadable
from engine.data.order import GlobalBatches, RankMicroBatches
from engine.detector import describe, loss_in_fp32
from engine.evaluation import coco_backend
from engine.forward import Precision, Preprocessor, TrainingForward
from engine.monitoring.live import LiveLine, memory_gb, step_text
from engine.monitoring.records import RecordFile, write_json
from engine.optim.build import build_optimizer, set_learning_rate
from engine.optim.schedule import Schedule, build_schedule
from engine.randomness import BUILD, FORWARD, seed_all
from engine.report import evaluate_and_report, finish_report
from engine.statistics import join_statistics
from engine.task import Task, task_of
from engine.weights import load_weights, save_weights
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
    loss_names: list[str] | None = None


def resolve(config: RunConfig, plan: BatchPlan, work_dir: Path) -> RunConfig:
    """The config as it runs: the batch triangle solved, and what DeepSpeed would assume in silence written down."""
    settings = {
        **config.deepspeed, **plan.as_keys(),
        # DeepSpeed's own default is 1.0; nobody who leaves the key out means that.
        "gradient_clipping": config.deepspeed.get("gradient_clipping", 0.0),
        "zero_allow_untested_optimizer": config.deepspeed.get("zero_allow_untested_optimizer", True),
        "zero_force_ds_cpu_optimizer": config.deepspeed.get("zero_force_ds_cpu_optimizer", False),
    }
    run = config.run.model_copy(update={"work_dir": str(work_dir)})
    return config.model_copy(update={"deepspeed": settings, "run": run})


def new_work_dir(config: RunConfig) -> Path:
    """The folder of this run. One that already holds a run is refused, so that nothing is written over."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = Path(config.run.work_dir or Path("work_dirs") / f"{config.name}-{stamp}").resolve()
    records = path / "metrics.jsonl"
    if records.exists() and records.stat().st_size:  # one that failed before its first step left nothing to lose
        raise ConfigError(f"work dir {path} already holds a run: choose another with --work-dir, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
        records.touch()
    except OSError as error:
        raise ConfigError(f"work dir {path} cannot be written: {error.strerror}") from None
    return path


def build_run(config: RunConfig) -> Run:
    """Build everything; any UserError is raised alike on all ranks."""
    deepspeed = distributed.import_deepspeed()
    rank = distributed.rank()
    with distributed.together():
        plan = solve_batch(config.deepspeed, distributed.world_size())
        _check_supported(config)
        check_deepspeed({**config.deepspeed, **plan.as_keys()})
        work_dir = new_work_dir(config) if rank == 0 else Path()
    work_dir = Path(distributed.broadcast_object(str(work_dir)))
    config = resolve(config, plan, work_dir)
    if rank == 0:
        write_json(work_dir / "config.json", config.to_json(), indent=2)
        say(f"config  {work_dir / 'config.json'}")
        for key, value in config.to_json().items():
            say(f"  {key}: {value}")
    task = task_of(config)
    with distributed.together():
        train, val, classes = task.build_data()
    with distributed.together():
        model = build_model(config, classes)
        batches = GlobalBatches(size=len(train.dataset), batch=plan.total, seed=config.run.seed,
                                landscape=landscape_flags(train.dataset) if config.data.group_by_aspect else None)
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
        keep_whole(model_engine, config.detector.skippable)
    if hasattr(optimizer, "attach"):
        try:
            size = config.optimizer.params.get("bucket_size")
            optimizer.attach(model_engine, **({} if size is None else {"bucket_size": size}))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    say(f"model   {describe(model)}")
    say(f"data    {len(train.dataset)} training and {len(val.dataset)} validation images, "
        f"{len(classes.all)} classes: {', '.join(classes.all[:8])}{', ...' if len(classes.all) > 8 else ''}")
    say(f"batch   {plan.total} = {plan.micro} x {plan.accumulation} accumulated x {plan.world} ranks; "
        f"{schedule.steps} steps, {batches.steps_per_epoch} an epoch, {schedule.warmup_steps} of warm-up; "
        f"ZeRO-{config.deepspeed.get('zero_optimization', {}).get('stage', 0)}, {str(precision.dtype)[6:]}")
    return Run(config=config, task=task, plan=plan, classes=classes, train=train, val=val, schedule=schedule,
               batches=batches, engine=model_engine, optimizer=optimizer, forward=forward, preprocess=preprocess,
               precision=precision, work_dir=work_dir)


def check_deepspeed(settings: dict[str, Any]) -> None:
    """Let DeepSpeed read its own keys before anything is built, and name the one it does not take."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"DeepSpeed does not accept \"{'.'.join(str(part) for part in first['loc'])}\" in "
                          f"{error.title.removeprefix('DeepSpeed').removesuffix('Config').lower()} ({first['msg']})") from None
    except Exception as error:  # its readers raise whatever a wrong value leads to
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"DeepSpeed does not accept this config ({type(error).__name__}: {reason})") from None


def _check_supported(config: RunConfig) -> None:
    stage = config.deepspeed.get("zero_optimization", {}).get("stage", 0)
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


def train(config: RunConfig) -> dict[str, float]:
    """Run the whole schedule; returns the last evaluation's metrics."""
    run = build_run(config)
    records = RecordFile(run.work_dir / "metrics.jsonl") if distributed.rank() == 0 else None
    steps = run.schedule.steps
    line = LiveLine(total=steps, label="train", interval=config.run.log_interval, enabled=distributed.rank() == 0)
    batches = MicroBatches(run)
    nonfinite = 0
    metrics: dict[str, float] = {}
    for step in range(steps):
        began = time.monotonic()
        lr_factor = run.schedule.factor(step)
        set_learning_rate(run.optimizer, lr_factor)
        losses: list[dict[str, float]] = []
        broken = 0
        for k in range(run.plan.accumulation):
            batch = batches.take()
            seed_all(config.run.seed, FORWARD, step, k * run.plan.world + distributed.rank())
            loss = run.engine(batch, alarm=batches.next_failed)
            run.engine.backward(loss)
            run.forward.gradients.release()
            run.engine.step()
            losses.append(run.forward.record.losses)
            broken += run.forward.record.broken_ranks
            batches.agree(run.forward.record.alarms)
        record = step_record(run, step, losses, lr_factor, seconds=time.monotonic() - began)
        if records is not None:
            records.write(record)
            write_events(run.engine, record)
        line.update(step_text(record))
        nonfinite = nonfinite + 1 if broken else 0
        if nonfinite >= config.run.max_nonfinite:
            stop_on_nonfinite(nonfinite, run.forward.record.losses, batch)
        last = step + 1 == steps
        save_due = due(run, config.run.checkpoint_interval, step, last=last)
        eval_due = due(run, config.run.eval_interval, step, last=last)
        if save_due or eval_due:
            join_statistics(run.engine.module)
        if save_due:
            save(run, step + 1)
        if eval_due:
            metrics = evaluate_and_report(run, plain_model(run), step + 1, last=last)
    line.close()
    if records is not None:
        records.close()
        finish_report(run.work_dir)
    distributed.barrier()
    return metrics


class MicroBatches:
    """This rank's micro-batches, one fetched ahead so that a broken image is known to all ranks before its turn."""

    def __init__(self, run: Run) -> None:
        order = RankMicroBatches(run.batches, run.plan, rank=distributed.rank(), start=0, stop=run.schedule.steps)
        self._iterator: Iterator[Any] = iter(
            training_loader(run.train.dataset, run.config.run.seed, order, workers=run.config.data.workers))
        self._next = next(self._iterator)
        with distributed.together():
            if self.next_failed:
                raise DataError(self._next.reason)

    @property
    def next_failed(self) -> bool:
        return isinstance(self._next, Unreadable)

    def take(self) -> dict[str, Any]:
        batch, self._next = self._next, next(self._iterator, None)
        return batch

    def agree(self, alarms: int) -> None:
        """Stop on all ranks where the next batch of any of them cannot be loaded."""
        if alarms:
            with distributed.together():
                if self.next_failed:
                    raise DataError(self._next.reason)


def step_record(run: Run, step: int, losses: list[dict[str, float]], lr_factor: float, *, seconds: float) -> dict[str, Any]:
    """The record of one optimizer step: losses are means over the micro-batches of all ranks."""
    if run.loss_names is None:  # once: ranks that later lack a part, or have one more, still sum vectors of one length
        run.loss_names = sorted({name for names in distributed.all_gather_objects(sorted(losses[0])) for name in names})
    names = run.loss_names
    mean = torch.tensor([sum(part.get(name, 0.0) for part in losses) / len(losses) for name in names],
                        dtype=torch.float64)
    mean = distributed.sum_over_ranks(mean) / run.plan.world
    norm = run.engine.get_global_grad_norm()
    record: dict[str, Any] = {
        "step": step + 1, "epoch": (step + 1) / run.schedule.steps_per_epoch, **dict(zip(names, mean.tolist())),
        "lr": run.config.optimizer.params["lr"] * lr_factor, "grad_norm": float(norm) if norm is not None else None,
        "images_per_second": run.plan.total / seconds, "seconds": seconds, "memory_gb": memory_gb()}
    if run.precision.dtype == torch.float16:
        record["loss_scale"] = float(run.engine.optimizer.loss_scale)
    modulator = getattr(run.optimizer, "modulator", None)
    if modulator is not None:
        record["mu"] = dict(modulator.mu)
        if modulator.last_window == step + 1:  # phi belongs to the step that measured it
            record["phi"] = dict(modulator.phi)
    return record


def write_events(model_engine: Any, record: dict[str, Any]) -> None:
    """The record for DeepSpeed's monitors (tensorboard, csv_monitor, wandb), as far as its config switches them on."""
    if model_engine.monitor.enabled:
        events = []
        for key, value in record.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                if key != "step" and number is not None:
                    events.append((f"train/{key}{'/' + name if name else ''}", number, record["step"]))
        model_engine.monitor.write_events(events)


def stop_on_nonfinite(count: int, losses: dict[str, float], batch: dict[str, Any]) -> None:
    images = [sample.img_id for sample in batch["data_samples"]]
    broken = not all(value == value and abs(value) != float("inf") for value in losses.values())
    with distributed.together():
        if broken:
            raise UserError(f"the loss was not finite in {count} optimizer steps in a row: losses {losses} on images {images} "
                            f"of rank {distributed.rank()}; lower optimizer.params.lr, lengthen the warm-up or set gradient_clipping")


def due(run: Run, interval: float | None, step: int, *, last: bool) -> bool:
    """Whether something with an interval in epochs comes after this step: never at 0, and always after the last one."""
    if interval == 0:
        return False
    if last or interval is None:
        return last
    every = max(1, round(interval * run.schedule.steps_per_epoch))
    return (step + 1) % every == 0


def plain_model(run: Run) -> nn.Module:
    """A model that any rank may run alone. Under ZeRO-3 this is a whole copy: a partitioned one would wait for the
    others at every layer, and in evaluation ranks see different numbers of images and objects."""
    if run.config.deepspeed.get("zero_optimization", {}).get("stage", 0) != 3:
        return run.engine.module
    whole = run.config.model_copy(update={"detector": run.config.detector.model_copy(
        update={"zero_init": False})})
    copy = build_model(whole, run.classes, empty=True).to(run.precision.dtype).to(distributed.device())
    target = copy.state_dict()
    for name, value in whole_state(run.engine.module):
        target[name].copy_(value)
    return copy


def save(run: Run, step: int) -> None:
    """`checkpoints/step-N.pth`: weights that mmdet loads, with class names; the oldest beyond keep_last go."""
    folder = run.work_dir / "checkpoints"
    tensors = {}
    for name, value in whole_state(run.engine.module):
        if distributed.rank() == 0:
            tensors[name] = value.to("cpu", copy=True)
    if distributed.rank() == 0:
        folder.mkdir(exist_ok=True)
        meta = dict(step=step, dataset_meta=run.classes.to_meta(), config=run.config.to_json())
        save_weights(folder / f"step-{step:06d}.pth", tensors, meta)
        for old in sorted(folder.glob("step-*.pth"))[:-run.config.run.keep_last]:
            old.unlink()
    distributed.barrier()


def say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)
