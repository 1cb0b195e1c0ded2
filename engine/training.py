"""The training loop: steps, records, checkpoints, evaluations, and what stops it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from engine import distributed, preemption
from engine.building import Run, build_run, plain_model, say
from engine.checkpoints import SaveError
from engine.checkpoints.best import best_step, mark_best
from engine.checkpoints.saving import checkpoints_of, prune_checkpoints, save_checkpoint
from engine.config import RunConfig, UserError
from engine.data.coco import DataError
from engine.data.loader import training_loader
from engine.data.mmdet_coco import Unreadable
from engine.data.order import RankMicroBatches
from engine.forward import MicroBatchRecord
from engine.monitoring.live import LiveLine, memory_gb, step_text
from engine.monitoring.records import RecordError, RecordFile, read_records
from engine.optim.build import set_learning_rate
from engine.randomness import FORWARD, seed_all
from engine.report import evaluate_and_report, finish_report
from engine.statistics import join_statistics
from engine.work_dir import Resume


class Diverged(UserError):
    """The loss was not finite for too many steps in a row."""


class Preempted(Exception):
    """A signal stopped the run; `saved` says whether a checkpoint of its last step is there."""

    def __init__(self, text: str, *, saved: bool) -> None:
        super().__init__(text)
        self.saved = saved


def train(config: RunConfig, resume: Resume | None = None) -> dict[str, float]:
    """Run the schedule to its end; returns the last evaluation's metrics."""
    preemption.watch()
    try:
        return run_schedule(build_run(config, resume))
    finally:
        preemption.release()


def run_schedule(run: Run) -> dict[str, float]:
    config, steps = run.config, run.schedule.steps
    with distributed.together():
        records = RecordFile(run.work_dir / "metrics.jsonl") if distributed.rank() == 0 else None
    line = LiveLine(
        total=steps, label="train", interval=config.run.log_interval, start=run.start, enabled=distributed.rank() == 0
    )
    batches = MicroBatches(run)
    nonfinite = 0
    metrics = after_step(run, run.start, resumed=True) if run.start else {}
    for step in range(run.start, steps):
        began = time.monotonic()
        lr_factor = run.schedule.factor(step)
        set_learning_rate(run.optimizer, lr_factor)
        losses: list[dict[str, float]] = []
        broken = 0
        for k in range(run.plan.accumulation):
            batch = batches.take()
            first = backward(run, step, k, batch if run.sam is None else run.sam.keep(batch), alarm=batches.next_failed)
            losses.append(first.losses)
            broken += first.broken_ranks
            if run.sam is None:
                run.engine.step()
            else:
                broken += run.sam.step(lambda k, batch: backward(run, step, k, batch).broken_ranks)
            batches.agree(first.alarms)
        if run.ema is not None and run.engine.was_step_applied():
            run.ema.update(step + 1)
        record, stop, lost = step_record(run, step, losses, lr_factor, seconds=time.monotonic() - began)
        if records is not None:
            write_record(run, records, record)
        line.update(step_text(record))
        nonfinite = nonfinite + 1 if broken else 0
        if nonfinite >= config.run.max_nonfinite:
            stop_on_nonfinite(nonfinite, run.forward.record.losses, batch)
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
            finish_report(run.work_dir)
    return metrics


def backward(run: Run, step: int, k: int, batch: dict[str, Any], *, alarm: bool = False) -> MicroBatchRecord:
    """The gradients of micro-batch k of a step, with random numbers of its own."""
    seed_all(run.config.run.seed, FORWARD, step, k * run.plan.world + distributed.rank())
    loss = run.engine(batch, alarm=alarm)
    run.engine.backward(loss)
    run.forward.gradients.release()
    return run.forward.record


def after_step(run: Run, done: int, *, resumed: bool = False) -> dict[str, float]:
    """What is due after a step: a checkpoint, then an evaluation. A run that resumed there has only the second to do,
    if it was stopped before that was on record."""
    settings, last = run.config.run, done == run.schedule.steps
    saved = resumed or (due(run, settings.checkpoint_interval, done, last=last) and save(run, done))
    metrics: dict[str, float] = {}
    if due(run, settings.eval_interval, done, last=last):
        join_statistics(run.engine.module)
        metrics = recorded_metrics(run, done) if resumed else {}
        if not metrics:
            metrics = evaluate_and_report(run, plain_model(run), done, last=last)
        if settings.checkpoint_interval != 0 and best(run) == done and (saved or save(run, done)):
            with contextlib.suppress(OSError):  # a pointer for people; what is best is on record
                if distributed.rank() == 0:
                    mark_best(checkpoints_of(run.work_dir), done)
            prune_checkpoints(run, best(run))
    return metrics


def write_record(run: Run, records: RecordFile, record: dict[str, Any]) -> None:
    """On rank 0, which alone knows where it fails: the others hear of it with the next step."""
    try:
        records.write(record)
        write_events(run.engine, record)
    except RecordError as error:
        if run.lost_record is None:
            say(
                f"{error}{'; training goes on (run.on_save_error)' if run.config.run.on_save_error == 'continue' else ''}"
            )
        run.lost_record = str(error)


def stop_on_lost_record(run: Run) -> None:
    if run.lost_record is not None and run.config.run.on_save_error == "stop":
        raise RecordError(run.lost_record)


def save(run: Run, done: int) -> bool:
    """Write a checkpoint; where that fails, stop or go on as `run.on_save_error` says."""
    try:
        save_checkpoint(run, done)
    except SaveError as error:
        if run.config.run.on_save_error == "stop":
            raise
        say(f"{error}; training goes on (run.on_save_error)")
        return False
    prune_checkpoints(run, best(run))
    return True


def leave_early(run: Run, done: int) -> None:
    """Save, and stop the run on all ranks."""
    if run.config.run.checkpoint_interval == 0:
        raise Preempted(
            f"stopped by a signal after step {done}; nothing saved (run.checkpoint_interval is 0)", saved=False
        )
    save_checkpoint(run, done)
    raise Preempted(
        f"stopped by a signal after step {done}, saved in {checkpoints_of(run.work_dir)}: go on with --resume",
        saved=True,
    )


def best(run: Run) -> int | None:
    """The step of the best evaluation on record."""
    with distributed.together():
        step = (
            best_step(read_records(run.work_dir / "evaluations.jsonl"), run.config.run.keep_best)
            if distributed.rank() == 0
            else None
        )
    return distributed.broadcast_object(step)


def recorded_metrics(run: Run, done: int) -> dict[str, float]:
    found = read_records(run.work_dir / "evaluations.jsonl") if distributed.rank() == 0 else []
    own = next((record for record in found if record["step"] == done), {})
    return distributed.broadcast_object({key: value for key, value in own.items() if key != "step"})


class MicroBatches:
    """This rank's micro-batches, one fetched ahead so that a broken image is known to all ranks before its turn."""

    def __init__(self, run: Run) -> None:
        order = RankMicroBatches(
            run.batches, run.plan, rank=distributed.rank(), start=run.start, stop=run.schedule.steps
        )
        self._iterator: Iterator[Any] = iter(
            training_loader(run.train.dataset, run.config.run.seed, order, workers=run.config.data.workers)
        )
        self._next = next(self._iterator, None)  # none where a finished run is resumed
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


def step_record(
    run: Run, step: int, losses: list[dict[str, float]], lr_factor: float, *, seconds: float
) -> tuple[dict[str, Any], bool, bool]:
    """The record of one optimizer step, losses being means over the micro-batches of all ranks; whether any rank has had
    a signal to stop; and whether rank 0 could not write the record before."""
    if run.loss_names is None:  # once: ranks that later lack a part, or have one more, still sum vectors of one length
        run.loss_names = sorted({name for names in distributed.all_gather_objects(sorted(losses[0])) for name in names})
    names = run.loss_names
    mean = torch.tensor(
        [
            *(sum(part.get(name, 0.0) for part in losses) / len(losses) for name in names),
            float(preemption.stop_asked()),
            float(run.lost_record is not None),
        ],
        dtype=torch.float64,
    )
    *mean, stop, lost = (distributed.sum_over_ranks(mean) / run.plan.world).tolist()
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
        record["loss_scale"] = float(run.engine.optimizer.loss_scale)
    modulator = getattr(run.optimizer, "modulator", None)
    if modulator is not None:
        record["mu"] = dict(modulator.mu)
        if modulator.last_window == step + 1:  # phi belongs to the step that measured it
            record["phi"] = dict(modulator.phi)
    return record, stop > 0, lost > 0


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
            raise Diverged(
                f"the loss was not finite in {count} optimizer steps in a row: losses {losses} on images {images} "
                f"of rank {distributed.rank()}; lower optimizer.params.lr, lengthen the warm-up or set gradient_clipping"
            )


def due(run: Run, interval: float | None, done: int, *, last: bool) -> bool:
    """Whether something with an interval in epochs comes after this step: never at 0, and always after the last one."""
    if interval == 0:
        return False
    if last or interval is None:
        return last
    every = max(1, round(interval * run.schedule.steps_per_epoch))
    return done % every == 0
