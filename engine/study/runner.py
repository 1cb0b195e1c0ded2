"""Run several trials at once, each in its own process, until the grid is complete.

Processes are forked from one that has imported everything, so the ten seconds for that are spent only once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from engine import folder_lock
from engine.errors import UserError
from engine.study.grid import Study, Trial, better, settings
from engine.study.start import make_start
from engine.study.trial import Outcome, read_outcome, run_trial

Outcomes = dict[Trial, Outcome]

TRIES = 3  # if the first few runs all fail, so would the others


def run_study(study: Study, rows: list[str], folder: Path, *, at_once: int, say: Callable[[str], None]) -> Outcomes:
    """Run every trial of the methods `rows` that has no outcome on disk yet; returns all outcomes."""
    # Overwritten, because the launch script has set it for one process on all cores. Two runs with two threads each on
    # two cores take twice as long.
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // at_once))
    server = get_context("forkserver")
    server.set_forkserver_preload(["engine.study.preload"])
    with _alone_in(folder, say):
        start = _start(study, folder, server, say)
        field = _Field(study, rows, folder, start, server, say)
        say(
            f"study   {field.total} runs of {len(rows)} methods at batches {', '.join(map(str, study.batches))}: "
            f"learning rates {', '.join(f'x{factor:g}' for factor in study.sweep)} of the rule with seed "
            f"{study.seeds[0]}, the best of them with {len(study.seeds) - 1} more; {field.done} are done, "
            f"{at_once} run at once"
        )
        with _ended(field.running):
            while field.begin(at_once) or field.running:
                time.sleep(0.2)
                field.collect()
        return field.outcomes


class _Field:
    """Keeps track of which trials are done, which are running, and which come next."""

    def __init__(
        self,
        study: Study,
        rows: list[str],
        folder: Path,
        start: Path | None,
        server: ForkServerContext,
        say: Callable[[str], None],
    ) -> None:
        self.study, self.rows, self.folder, self.start, self.server, self.say = study, rows, folder, start, server, say
        self.outcomes = read_outcomes(study, rows, folder)
        self.running: dict[Trial, ForkServerProcess] = {}
        self.total = len(rows) * len(study.batches) * (len(study.sweep) + len(study.seeds) - 1)
        self.began, self.finished, self.failed = time.monotonic(), 0, 0

    @property
    def done(self) -> int:
        return self.total - missing_runs(self.study, self.rows, self.outcomes)

    def begin(self, at_once: int) -> bool:
        """Start trials that are due, up to `at_once` at a time; False if none is due."""
        due = due_trials(self.study, self.rows, self.outcomes)
        for trial in (trial for trial in due if trial not in self.running):
            if len(self.running) >= at_once:
                break
            # Another method may have the same settings here, for example MegDet below the knee.
            own = settings(self.study, trial)
            same = next(
                (other for other in [*self.outcomes, *self.running] if settings(self.study, other) == own), None
            )
            if same is None:
                self.running[trial] = self.server.Process(
                    target=run_trial, args=(self.study, trial, self.folder / trial.name, self.start)
                )
                self.running[trial].start()
            elif same in self.outcomes:
                _copy(self.folder / same.name, self.folder / trial.name)
                self.outcomes[trial] = self.outcomes[same]
                self.say(
                    f"[{self.done}/{self.total}] {_label(trial)}: the same run as {_label(same)}, taken from there"
                )
        return bool(due)

    def collect(self) -> None:
        """Read the outcomes of the runs that have ended."""
        for trial in [trial for trial, process in self.running.items() if not process.is_alive()]:
            log = f"{self.folder / trial.name}.log"
            outcome = read_outcome(self.folder / trial.name)
            if outcome is None:
                raise UserError(
                    f"the run {trial.name} ended with {self.running[trial].exitcode} and no outcome: see {log}; start "
                    "the same command again to continue"
                )
            del self.running[trial]
            self.outcomes[trial] = outcome
            self.finished, self.failed = self.finished + 1, self.failed + bool(outcome.error)
            left = (time.monotonic() - self.began) / self.finished * (self.total - self.done)
            self.say(
                f"[{self.done}/{self.total}] {_label(trial)}: {_text(outcome)} in {outcome.seconds:.0f} s, "
                f"ETA {_duration(left)}"
            )
            if self.failed == self.finished >= TRIES:
                raise UserError(f"the first {self.finished} runs failed, the last one with {outcome.error}: see {log}")


@contextlib.contextmanager
def _alone_in(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Refuse a second study in the same folder: both would remove each other's runs."""
    try:
        folder_lock.hold(folder, say)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        folder_lock.release_all()


@contextlib.contextmanager
def _ended(running: dict[Trial, ForkServerProcess]) -> Iterator[None]:
    """Ends all running processes on exit, also after an error or a signal."""
    try:
        yield
    finally:
        # A process that was being started when a signal came has no pid yet. It ends itself when its parent is gone.
        started = [process for process in running.values() if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def _copy(source: Path, target: Path) -> None:
    """Copy a folder completely or not at all."""
    part = target.with_name(f"{target.name}.part")
    for rest in (part, target):
        shutil.rmtree(rest, ignore_errors=True)
    shutil.copytree(source, part)
    part.rename(target)


def missing_runs(study: Study, rows: list[str], outcomes: Outcomes) -> int:
    """How many runs are left, including those whose learning rate is not known yet."""
    missing = 0
    for method in rows:
        for batch in study.batches:
            sweep = sum(Trial(method, batch, factor, study.seeds[0]) not in outcomes for factor in study.sweep)
            best = None if sweep else best_trial(study, method, batch, outcomes)
            missing += sweep + sum(best is None or best._replace(seed=seed) not in outcomes for seed in study.seeds[1:])
    return missing


def due_trials(study: Study, rows: list[str], outcomes: Outcomes) -> list[Trial]:
    """The trials that can run now: the sweep of every method and batch, then the other seeds at the best learning rate.

    Batch by batch, so that a study that was stopped early has complete columns.
    """
    due = []
    for batch in study.batches:
        for method in rows:
            swept = [Trial(method, batch, factor, study.seeds[0]) for factor in study.sweep]
            missing = [trial for trial in swept if trial not in outcomes]
            if not missing:
                best = best_trial(study, method, batch, outcomes)
                missing = [
                    trial for seed in study.seeds[1:] for trial in [best._replace(seed=seed)] if trial not in outcomes
                ]
            due += missing
    return due


def best_trial(study: Study, method: str, batch: int, outcomes: Outcomes) -> Trial:
    """The best trial of the sweep; if all diverged, that with the smallest learning rate."""
    swept = sorted(
        (Trial(method, batch, factor, study.seeds[0]) for factor in study.sweep), key=lambda trial: trial.factor
    )
    best = swept[0]
    for trial in swept[1:]:
        if better(outcomes[trial].score, outcomes[best].score):
            best = trial
    return best


def read_outcomes(study: Study, rows: list[str], folder: Path) -> Outcomes:
    trials = [
        Trial(method, batch, factor, seed)
        for method in rows
        for batch in study.batches
        for factor in study.sweep
        for seed in study.seeds
    ]
    found = {trial: read_outcome(folder / trial.name) for trial in trials}
    # A run that failed for a reason other than divergence is tried again.
    return {trial: outcome for trial, outcome in found.items() if outcome is not None and outcome.error is None}


def _start(study: Study, folder: Path, server: ForkServerContext, say: Callable[[str], None]) -> Path | None:
    """The file with the weights that all runs start from, trained first if it is not there yet."""
    if study.start is None:
        return None
    path = folder / "start.pth"
    if not path.exists():
        say(
            f"start   {study.start.epochs:g} epochs of {study.start.method} at batch {study.batches[0]} give the "
            f"weights of {', '.join(study.start.keep)} that all runs start from"
        )
        shutil.rmtree(folder / "start", ignore_errors=True)
        process = server.Process(target=make_start, args=(study, path))
        with _ended({Trial("start", study.batches[0], 1.0, 0): process}):
            process.start()
            process.join()
        if not path.exists():
            raise UserError(f"the common start could not be trained: see {folder / 'start.log'}")
    return path


def _label(trial: Trial) -> str:
    return f"{trial.method} batch {trial.batch} lr x{trial.factor:g} seed {trial.seed}"


def _text(outcome: Outcome) -> str:
    if outcome.diverged:
        return "diverged"
    return f"failed ({outcome.error})" if outcome.error else f"{outcome.score:.3f}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
