"""Run checks one after another on all ranks, show a line for each, and keep everything for the file."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import distributed, heartbeat
from engine.doctor.finding import FAIL, PASS, SKIP, Finding, Outcome, Skipped
from engine.doctor.watchdog import Board, Watchdog
from engine.errors import UserError, first_line
from engine.files import make_folder, write_json

FAILED = 2  # the exit code
MEETING = "meeting"
_WAIT_FOR_MESSAGE = 5.0  # launchers end all ranks of a node when one exits: rank 0 first writes the file


class Examination:
    """Facts and outcomes, on rank 0 also on screen and in the file `out`. `leave` ends the process at once."""

    def __init__(self, out: Path, *, limit: float, leave: Callable[[int], Any]) -> None:
        self.out = out
        self.outcomes: list[Outcome] = []
        self._facts: dict[str, Any] = {}
        self._screen: list[str] = []
        self._leave = leave
        self._began = time.monotonic()
        self.watchdog = Watchdog(self._stuck, limit=limit)

    def meet(self, form_groups: Callable[[], None]) -> None:
        """Form the process groups, watched: on a new cluster this is the first thing to hang."""
        try:
            with self.watchdog.watching(MEETING):
                form_groups()
                self.watchdog.board = Board()
        except (RuntimeError, OSError) as error:
            raise UserError(f"{_waiting()} and cannot meet the others: {first_line(error)}") from error
        if self.watchdog.board.problem is not None:
            self.note(f"if ranks hang, nobody can be named: {self.watchdog.board.problem}")

    def say(self, line: str) -> None:
        self._screen.append(line)
        distributed.say(line)

    def fact(self, name: str, text: str) -> None:
        self.say(f"      {name:<22} {text}")

    def note(self, text: str) -> None:
        """Something that works but that the user should know."""
        self.say(f"note  {text}")

    def keep(self, name: str, value: Any) -> None:
        """For the file only."""
        self._facts[name] = value

    def check(self, name: str, body: Callable[[], Finding]) -> Outcome:
        """Run `body` on all ranks. It passes if it passes on each of them; an error fails it and no other check."""
        began = time.monotonic()
        with self.watchdog.watching(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                status, finding = PASS, body()
                if not finding.passed:
                    status = FAIL
            except Skipped as reason:
                status, finding = SKIP, Finding(str(reason))
            except Exception as error:
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                text = kind + first_line(error)
                status, finding = FAIL, Finding(text, False, {"traceback": traceback.format_exc()})
                if self.watchdog.board is not None:
                    self.watchdog.board.post(name, text)
            try:
                found = distributed.all_gather_objects((status, finding))
            except RuntimeError:  # another rank has ended: rank 0's watchdog, or one that the heartbeat names
                heartbeat.settle()
                self._leave(FAILED)
                raise
        outcome = _together(name, found, time.monotonic() - began)
        self.outcomes.append(outcome)
        self._show(outcome)
        return outcome

    def close(self) -> None:
        """Write the file and print the closing sentence. If something failed it is a UserError, on all ranks."""
        failed = [outcome.name for outcome in self.outcomes if outcome.status == FAIL]
        seconds = time.monotonic() - self._began
        count = f"{len(self.outcomes)} checks in {seconds:.0f} s on {_ranks()}"
        sentence = f"{count}, failed: {', '.join(failed)}" if failed else f"all well: {count}"
        sentence += f"; details: {self.out}"
        with distributed.together():
            if distributed.rank() == 0:
                self._screen.append(sentence)
                write_json(self.out, self._report(seconds), indent=1)
        if failed:
            raise UserError(sentence)
        distributed.say(sentence)

    def _show(self, outcome: Outcome) -> None:
        self.say(outcome.line())
        for row in outcome.table:
            self.say(f"      {row}")

    def _report(self, seconds: float) -> dict[str, Any]:
        return {
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(seconds, 1),
            "screen": self._screen,
            "checks": [
                {
                    "name": o.name,
                    "status": o.status,
                    "text": o.text,
                    "seconds": round(o.seconds, 3),
                    "details": dict(o.details),
                }
                for o in self.outcomes
            ],
            "facts": self._facts,
        }

    def _stuck(self, name: str, reason: str) -> None:
        """In the watchdog's thread, on every rank: no collective works any more."""
        if name == MEETING:
            reason += f": {_waiting()}; are all ranks started, and may they reach that port?"
            if distributed.rank() and distributed.local_rank() == 0:  # rank 0 may not even exist
                print(f"error: {name} {reason}", file=sys.stderr, flush=True)
        if distributed.rank() == 0:
            outcome = Outcome(name, FAIL, reason, time.monotonic() - self._began)
            self.outcomes.append(outcome)
            self._show(outcome)
            sentence = f"{name} hangs, and what comes after it was not tried; details: {self.out}"
            self._screen.append(sentence)
            try:
                make_folder(self.out.parent)
                write_json(self.out, self._report(time.monotonic() - self._began), indent=1)
            except UserError as problem:
                sentence += f" (missing: {problem})"
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        else:
            time.sleep(_WAIT_FOR_MESSAGE)
        self._leave(FAILED)


def _waiting() -> str:
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"rank {distributed.rank()} of {distributed.world_size()} on {socket.gethostname()} looks for the others at "
        f"{host}:{port}"
    )


def _ranks() -> str:
    world = distributed.world_size()
    return f"{world} rank{'s' * (world > 1)}"


def _together(name: str, found: list[tuple[str, Finding]], seconds: float) -> Outcome:
    """The worst of all ranks' findings; who failed is named."""
    for wanted in (FAIL, PASS, SKIP):
        which = [rank for rank, (status, _) in enumerate(found) if status == wanted]
        if which:
            break
    finding = found[which[0]][1]
    text = finding.text
    if wanted == FAIL and len(found) > 1 and len(which) < len(found):
        more = "" if len(which) == 1 else f" and {len(which) - 1} more"
        text = f"rank {which[0]}{more}: {text}"
    return Outcome(name, wanted, text, seconds, finding.details, found[0][1].table)
