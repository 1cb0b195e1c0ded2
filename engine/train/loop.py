"""The training loop: steps, records, and reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from engine import distributed, folder_lock, preemption
from engine.checkpoints.store import checkpoints_of, saved_steps
from engine.config import RunConfig
from engine.data.loader import training_loader
from engine.data.order import RankMicroBatches
from engine.data.samples import Unreadable
from engine.distributed import say
from engine.errors import DataError, SaveError, UserError
from engine.files import METRICS, WriteError
from engine.modeling.progress import Progress, tell
from engine.monitoring.live import LiveLine, memory_gb, step_text
from engine.monitoring.records import RecordFile, read_records
from engine.optim.agvm import AGVMOptimizer
from engine.optim.registry import set_learning_rate
from engine.randomness import FORWARD, seed_all
from engine.train.after_step import after_step, leave_early
from engine.train.build import build_run
from engine.train.forward import MicroBatchRecord
from engine.train.report import finish_report
from engine.train.run import GOES_ON, Run
from engine.train.work_dir import Resume


class Diverged(UserError):
    """The loss was not finite for too many steps in a row."""


def train(config: RunConfig, resume: Resume | None = None) -> dict[str, float]:
    """Train to the end of the schedule; returns the metrics of the last evaluation."""
    preemption.watch()
    try:
        run = build_run(config, resume)
        preemption.watch_interrupts()
        return run_schedule(run)
    finally:
        folder_lock.release_all()
        preemption.release()


def run_schedule(run: Run) -> dict[str, float]:
    config, steps = run.config, run.schedule.steps
    with distributed.together():
        records = RecordFile(run.work_dir / METRICS) if distributed.rank() == 0 else None
    line = LiveLine(
        total=steps, label="train", interval=config.run.log_interval, start=run.start, enabled=distributed.rank() == 0
    )
    batches = MicroBatches(run)
    nonfinite, culprit = ended_nonfinite(run), None
    metrics = after_step(run, run.start, resumed=True) if run.start else {}
    for step in range(run.start, steps):
        began = time.monotonic()
        lr_factor = run.schedule.factor(step)
        set_learning_rate(run.optimizer, lr_factor)
        losses: list[dict[str, float]] = []
        broken, culprit = 0, None
        for k in range(run.plan.accumulation):
            batch = batches.take()
            first = backward(run, step, k, batch if run.sam is None else run.sam.keep(batch), alarm=batches.next_failed)
            losses.append(first.losses)
            broken += first.broken_ranks
            culprit = culprit or (None if first.finite else (first.losses, batch))
            if run.sam is None:
                run.engine.step()
            else:
                broken += run.sam.step(partial(second_pass, run, step))
            batches.agree(first.alarms)
        if run.ema is not None and run.engine.was_step_applied():
            run.ema.update(step + 1)
        record, stop, lost = step_record(run, step, losses, lr_factor, seconds=time.monotonic() - began)
        if records is not None:
            write_record(run, records, record)
        line.update(step_text(record))
        nonfinite = nonfinite + 1 if broken else 0
        if nonfinite >= config.run.max_nonfinite:
            stop_on_nonfinite(nonfinite, culprit, at_the_end=False)
        if lost:
            with distributed.together():
                stop_on_lost_record(run)
        if stop:
            leave_early(run, step + 1)
        metrics = after_step(run, step + 1) or metrics
    line.close()
    with distributed.together():
        if records is not None:
            stop_on_lost_record(run)
            records.close()
            if run.lost_record is not None:
                say(f"the records are not complete: {run.lost_record}")
            finish_report(run.work_dir)
    if run.lost_save is not None:
        raise SaveError(unsaved_end(run))
    if nonfinite:
        stop_on_nonfinite(nonfinite, culprit, at_the_end=True)
    return metrics


def unsaved_end(run: Run) -> str:
    with distributed.together():
        saved = saved_steps(checkpoints_of(run.work_dir))
    newest = f"the newest one is of step {saved[-1]}" if saved else "there is none"
    return f"all {run.schedule.steps} steps are done, but their result is not saved: {run.lost_save}; {newest}"


def ended_nonfinite(run: Run) -> int:
    """1 if the last step before this start had a loss that is not finite, else 0."""
    with distributed.together():
        before = read_records(run.work_dir / METRICS)[-1:] if distributed.rank() == 0 and run.start else []
    return distributed.broadcast_object(int(any(isinstance(record.get("loss"), str) for record in before)))


def backward(run: Run, step: int, k: int, batch: dict[str, Any], *, alarm: bool = False) -> MicroBatchRecord:
    """Compute the gradients of micro-batch k of a step, with random numbers that depend on step and k."""
    seed_all(run.config.run.seed, FORWARD, step, k * run.plan.world + distributed.rank())
    tell(Progress(step, run.schedule.steps, run.schedule.steps_per_epoch, run.config.run.seed))
    loss = run.engine(batch, alarm=alarm)
    run.engine.backward(loss)
    run.forward.gradients.release()
    return run.forward.record


def second_pass(run: Run, step: int, k: int, batch: dict[str, Any]) -> int:
    """SAM's second pass over a micro-batch; returns the number of ranks with a non-finite loss."""
    return backward(run, step, k, batch).broken_ranks


def write_record(run: Run, records: RecordFile, record: dict[str, Any]) -> None:
    """Write the record on rank 0. If that fails, the other ranks learn of it in the next step."""
    try:
        records.write(record)
        write_events(run.engine, record)
    except WriteError as error:
        if run.lost_record is None:
            say(f"{error}; {GOES_ON}" if run.config.run.on_save_error == "continue" else str(error))
        run.lost_record = str(error)


def stop_on_lost_record(run: Run) -> None:
    if run.lost_record is not None and run.config.run.on_save_error == "stop":
        raise WriteError(run.lost_record)


class MicroBatches:
    """This rank's micro-batches. The next one is fetched early, so that all ranks learn of a broken image in time."""

    def __init__(self, run: Run) -> None:
        order = RankMicroBatches(
            run.batches, run.plan, rank=distributed.rank(), start=run.start, stop=run.schedule.steps
        )
        self._iterator: Iterator[Any] = iter(
            training_loader(run.train.dataset, run.config.run.seed, order, workers=run.config.data.workers)
        )
        self._next: Any = next(self._iterator, None)  # None if a finished run is resumed
        self.agree(alarms=1)

    @property
    def next_failed(self) -> bool:
        return isinstance(self._next, Unreadable)

    def take(self) -> dict[str, Any]:
        batch, self._next = self._next, next(self._iterator, None)
        return batch

    def agree(self, alarms: int) -> None:
        """If `alarms` of the ranks could not load their next batch, stop on all ranks."""
        if alarms:
            with distributed.together():
                if self.next_failed:
                    raise DataError(self._next.reason)


def step_record(
    run: Run, step: int, losses: list[dict[str, float]], lr_factor: float, *, seconds: float
) -> tuple[dict[str, Any], bool, bool]:
    """The record of one optimizer step, with losses averaged over the micro-batches of all ranks; whether any rank
    received a signal to stop; and whether rank 0 could not write an earlier record."""
    if run.loss_names is None:  # only once: later all ranks must sum vectors of the same length
        run.loss_names = sorted({name for names in distributed.all_gather_objects(sorted(losses[0])) for name in names})
    names = run.loss_names
    values = torch.tensor(
        [
            *(sum(part.get(name, 0.0) for part in losses) / len(losses) for name in names),
            float(preemption.stop_asked()),
            float(run.lost_record is not None),
        ],
        dtype=torch.float64,
    )
    *mean, stop, lost = (distributed.sum_over_ranks(values) / run.plan.world).tolist()
    norm = run.engine.get_global_grad_norm()
    record: dict[str, Any] = {
        "step": step + 1,
        "epoch": (step + 1) / run.schedule.steps_per_epoch,
        **dict(zip(names, mean)),
        "lr": run.config.optimizer.params["lr"] * lr_factor,
        "grad_norm": float(norm) if norm is not None else None,
        "images_per_second": run.plan.total / seconds,
        "seconds": seconds,
        "memory_gb": memory_gb(),
    }
    if run.precision.dtype == torch.float16:
        record["loss_scale"] = run.layout.loss_scale()
    if isinstance(run.optimizer, AGVMOptimizer):
        modulator = run.optimizer.modulator
        record["mu"] = dict(modulator.mu)
        if modulator.last_window == step + 1:  # phi was measured in this step
            record["phi"] = dict(modulator.phi)
    return record, stop > 0, lost > 0


def write_events(model_engine: Any, record: dict[str, Any]) -> None:
    """Send the record to DeepSpeed's monitors (tensorboard, csv_monitor, wandb) that the config enables."""
    if model_engine.monitor.enabled:
        events = []
        for key, value in record.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                if key != "step" and number is not None:
                    events.append((f"train/{key}{'/' + name if name else ''}", number, record["step"]))
        model_engine.monitor.write_events(events)


def stop_on_nonfinite(count: int, culprit: tuple[dict[str, float], dict[str, Any]] | None, *, at_the_end: bool) -> None:
    """`culprit`: losses and batch of this rank's first micro-batch whose loss was not finite, if it had one."""
    where = f"the last {count} optimizer steps of the run" if at_the_end else f"{count} optimizer steps in a row"
    advice = "lower optimizer.params.lr, lengthen the warm-up or set gradient_clipping"
    with distributed.together():
        if culprit is not None:
            losses, batch = culprit
            images = [sample.img_id for sample in batch["data_samples"]]
            raise Diverged(
                f"the loss was not finite in {where}: losses {losses} on images {images} of rank "
                f"{distributed.rank()}; {advice}"
            )
    raise Diverged(f"the loss was not finite in {where}, as {METRICS} or SAM's second pass shows; {advice}")
