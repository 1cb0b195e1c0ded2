"""The training loop: steps, records, and reasons to stop."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from engine import distributed, folder_lock, preemption
from engine.checkpoints.store import checkpoints_of, saved_steps
from engine.config import RunConfig
from engine.data.device_feed import DeviceFeed
from engine.data.loader import training_loader
from engine.data.order import RankMicroBatches
from engine.data.samples import Unreadable
from engine.distributed import say
from engine.errors import DataError, SaveError, UserError
from engine.files import METRICS, WriteError
from engine.modeling.progress import Progress, tell
from engine.monitoring.live import LiveLine
from engine.monitoring.records import RecordFile, read_records
from engine.optim.registry import set_learning_rate
from engine.randomness import FORWARD, seed_all
from engine.train.after_step import after_step, follows, leave_early
from engine.train.build import build_run
from engine.train.forward import MicroBatchRecord, Notices
from engine.train.journal import Journal, step_record
from engine.train.report import finish_report
from engine.train.run import Run
from engine.train.work_dir import Resume

Culprit = tuple[dict[str, torch.Tensor], dict[str, Any]]  # losses of this rank, and the batch


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
    batches, journal = MicroBatches(run), Journal(run, records, line)
    nonfinite, culprit = ended_nonfinite(run), None
    metrics = after_step(run, run.start, resumed=True) if run.start else {}
    for step in range(run.start, steps):
        began = time.monotonic()
        lr_factor = run.schedule.factor(step)
        set_learning_rate(run.optimizer, lr_factor)
        losses: list[dict[str, float]] = []
        told: list[Notices] = []
        broken, culprit = 0, None
        for k in range(run.plan.accumulation):
            batch = batches.take()
            run.forward.notices = Notices(batches.next_failed, preemption.stop_asked(), run.lost_record is not None)
            first = backward(run, step, k, batch if run.sam is None else run.sam.keep(batch))
            journal.write()  # of the step before: by now the device is past it
            losses.append(first.losses)
            told.append(first.told)
            broken += first.broken_ranks
            culprit = culprit or (None if first.finite else (first.own, batch))
            if run.sam is None:
                run.engine.step()
            else:
                run.forward.notices = Notices()
                broken += run.sam.step(partial(second_pass, run, step))
            batches.agree(first.told.unreadable)
        if run.ema is not None and run.engine.was_step_applied():
            run.ema.update(step + 1)
        journal.keep(*step_record(run, step, losses, lr_factor, began=began, waited=batches.waited()))
        nonfinite = nonfinite + 1 if broken else 0
        if nonfinite >= config.run.max_nonfinite:
            journal.write()
            stop_on_nonfinite(nonfinite, culprit, at_the_end=False)
        if any(notices.unwritten for notices in told):
            journal.write()
            with distributed.together():
                stop_on_lost_record(run)
        if any(notices.stop for notices in told):
            journal.write()
            leave_early(run, step + 1)
        if follows(run, step + 1):
            journal.write()
            metrics = after_step(run, step + 1) or metrics
    journal.write()
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


def backward(run: Run, step: int, k: int, batch: dict[str, Any]) -> MicroBatchRecord:
    """Compute the gradients of micro-batch k of a step, with random numbers that depend on step and k."""
    seed_all(run.config.run.seed, FORWARD, step, k * run.plan.world + distributed.rank())
    tell(Progress(step, run.schedule.steps, run.schedule.steps_per_epoch, run.config.run.seed))
    loss = run.engine(batch)
    run.engine.backward(loss)
    run.forward.gradients.release()
    return run.forward.record


def second_pass(run: Run, step: int, k: int, batch: dict[str, Any]) -> int:
    """SAM's second pass over a micro-batch; returns the number of ranks with a non-finite loss."""
    return backward(run, step, k, batch).broken_ranks


def stop_on_lost_record(run: Run) -> None:
    if run.lost_record is not None and run.config.run.on_save_error == "stop":
        raise WriteError(run.lost_record)


class MicroBatches:
    """This rank's micro-batches. The next one is fetched early, so that all ranks learn of a broken image in time."""

    def __init__(self, run: Run) -> None:
        order = RankMicroBatches(
            run.batches, run.plan, rank=distributed.rank(), start=run.start, stop=run.schedule.steps
        )
        device, data = distributed.device(), run.config.data
        loader = training_loader(
            run.train.dataset, run.config.run.seed, order, workers=data.workers, pinned=device.type != "cpu"
        )
        self._feed = DeviceFeed(loader, device)
        self._feed.waited_since()  # starting the loader is not waiting
        self.agree(True)

    @property
    def next_failed(self) -> bool:
        return isinstance(self._feed.next, Unreadable)

    def take(self) -> dict[str, Any]:
        return self._feed.take()

    def waited(self) -> float:
        """Seconds spent waiting for data since the last call."""
        return self._feed.waited_since()

    def agree(self, failed: bool) -> None:
        """If any rank could not load its next batch, stop on all ranks."""
        if failed:
            with distributed.together():
                if isinstance(self._feed.next, Unreadable):
                    raise DataError(self._feed.next.reason)


def stop_on_nonfinite(count: int, culprit: Culprit | None, *, at_the_end: bool) -> None:
    """`culprit`: this rank's first micro-batch whose loss was not finite, if it had one."""
    where = f"the last {count} optimizer steps of the run" if at_the_end else f"{count} optimizer steps in a row"
    advice = "lower optimizer.params.lr, lengthen the warm-up or set gradient_clipping"
    with distributed.together():
        if culprit is not None:
            own, batch = culprit
            losses = {name: float(value) for name, value in own.items()}
            images = [sample.img_id for sample in batch["data_samples"]]
            raise Diverged(
                f"the loss was not finite in {where}: losses {losses} on images {images} of rank "
                f"{distributed.rank()}; {advice}"
            )
    raise Diverged(f"the loss was not finite in {where}, as {METRICS} or SAM's second pass shows; {advice}")
