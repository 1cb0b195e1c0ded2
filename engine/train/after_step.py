"""What follows an optimizer step: a checkpoint, an evaluation, or an early stop (`engine.preemption`)."""

from __future__ import annotations

import contextlib

from engine import distributed, preemption
from engine.checkpoints.best import best_step, mark_best
from engine.checkpoints.saving import prune_checkpoints, save_checkpoint
from engine.checkpoints.store import checkpoints_of
from engine.distributed import say
from engine.errors import SaveError
from engine.files import EVALUATIONS
from engine.modeling.statistics import join_statistics
from engine.monitoring.records import read_records
from engine.train.evaluate import evaluate_and_report, plain_model
from engine.train.run import GOES_ON, Run


class Preempted(Exception):
    """The run was asked to stop. `saved` says whether there is a checkpoint of its last step."""

    def __init__(self, text: str, *, saved: bool) -> None:
        super().__init__(text)
        self.saved = saved


def after_step(run: Run, done: int, *, resumed: bool = False) -> dict[str, float]:
    """Save a checkpoint and then evaluate, if they are due after this step. A run that `resumed` at this step only
    evaluates, and only if the evaluation was not recorded before."""
    settings, last = run.config.run, done == run.schedule.steps
    saved = resumed or (due(run, settings.checkpoint_interval, done, last=last) and save(run, done))
    metrics: dict[str, float] = {}
    if due(run, settings.eval_interval, done, last=last):
        join_statistics(run.engine.module)
        metrics = recorded_metrics(run, done) if resumed else {}
        if not metrics:
            metrics = evaluate_and_report(run, plain_model(run), done, last=last)
        if settings.checkpoint_interval != 0 and best(run) == done and (saved or save(run, done)):
            with contextlib.suppress(OSError):  # only a link for people; the records say what is best
                if distributed.rank() == 0:
                    mark_best(checkpoints_of(run.work_dir), done)
            prune_checkpoints(run.work_dir, keep_last=run.config.run.keep_last, best=best(run))
    return metrics


def follows(run: Run, done: int) -> bool:
    """Whether a checkpoint or an evaluation is due after this step."""
    settings, last = run.config.run, done == run.schedule.steps
    return any(
        due(run, interval, done, last=last) for interval in (settings.checkpoint_interval, settings.eval_interval)
    )


def save(run: Run, done: int) -> bool:
    """Write a checkpoint. If that fails, stop or continue as `run.on_save_error` says."""
    try:
        save_checkpoint(run.state(), run.work_dir, done)
    except SaveError as error:
        if run.config.run.on_save_error == "stop":
            raise
        say(f"{error}; {GOES_ON}")
        run.lost_save = str(error)
        return False
    run.lost_save = None
    prune_checkpoints(run.work_dir, keep_last=run.config.run.keep_last, best=best(run))
    return True


def leave_early(run: Run, done: int) -> None:
    """Save, and stop the run on all ranks."""
    what = f"stopped {preemption.reason()} after step {done}"
    if run.config.run.checkpoint_interval == 0:
        raise Preempted(f"{what}; nothing saved (run.checkpoint_interval is 0)", saved=False)
    save_checkpoint(run.state(), run.work_dir, done)
    raise Preempted(f"{what}, saved in {checkpoints_of(run.work_dir)}: continue with --resume", saved=True)


def best(run: Run) -> int | None:
    """The step of the best recorded evaluation."""
    with distributed.together():
        records = read_records(run.work_dir / EVALUATIONS) if distributed.rank() == 0 else []
        step = best_step(records, run.config.run.keep_best)
    return distributed.broadcast_object(step)


def recorded_metrics(run: Run, done: int) -> dict[str, float]:
    found = read_records(run.work_dir / EVALUATIONS) if distributed.rank() == 0 else []
    own = next((record for record in found if record["step"] == done), {})
    return distributed.broadcast_object({key: value for key, value in own.items() if key != "step"})


def due(run: Run, interval: float | None, done: int, *, last: bool) -> bool:
    """Whether something with this interval in epochs follows this step: never if it is 0, else also after the last."""
    if interval == 0:
        return False
    if last or interval is None:
        return last
    every = max(1, round(interval * run.schedule.steps_per_epoch))
    return done % every == 0
