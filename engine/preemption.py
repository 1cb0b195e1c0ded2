"""Signals, and a launcher that is gone: save a checkpoint, then exit.

Schedulers send SIGTERM or SIGUSR1 before they take a machine away, a terminal sends SIGINT (Ctrl-C) or SIGHUP. The
first signal asks for a stop after the current step. A later one ends the process at once. Launchers forward a signal to
ranks that already received it (DeepSpeed's launcher does so rank by rank), so a signal within ECHO seconds of the first
counts as the same one.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from engine import launcher

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped early and saved; start again with --resume
NUMBER = int(signal.SIGTERM)
ECHO = 2.0
# These are obeyed even if ignored before. The two of a terminal are not: nohup and `&` in a script mean it.
_ALWAYS = (signal.SIGTERM, signal.SIGUSR1)

_first: float | None = None
_before: dict[int, Any] = {}


def watch() -> None:
    """Handle the signals from now on, but for SIGINT. Call this in the main thread, once per run."""
    global _first
    _first = None
    for number in (*_ALWAYS, signal.SIGHUP):
        _take(number)


def watch_interrupts() -> None:
    """Handle SIGINT too: from the first step on there is something to save."""
    _take(signal.SIGINT)


def stop_asked() -> bool:
    """Whether this process received a signal, or its launcher is gone. Other ranks may not know of it."""
    return _first is not None or launcher.gone()


def reason() -> str:
    """Why this process stops, or that the reason lies with another rank."""
    if _first is None and launcher.gone():
        return "by the end of its launcher"
    return "by a signal"


def release() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()


def ignore_in_loader() -> None:
    """Ignore the signals in a loader process: its rank still needs data for the current step."""
    for number in (*_ALWAYS, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _take(number: int) -> None:
    before = signal.getsignal(number)
    if number in _ALWAYS or before != signal.SIG_IGN:
        _before.setdefault(number, before)
        signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = now
        if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":  # somebody waits for an answer
            os.write(2, b"\nCtrl-C: saving after this step; once more ends the run at once\n")
    elif now - _first > ECHO:
        os._exit(128 + number)
