"""SIGTERM and SIGUSR1, as schedulers send them before they take a machine away: save, then leave.

The first signal asks for a stop after the present step. A later one ends the process at once. Launchers pass a signal
on that the ranks have had already (DeepSpeed's does so to one rank after the other), so what comes within ECHO seconds
of the first is the same signal.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped before the end, saved, to be started again with --resume
NUMBER = int(signal.SIGTERM)
ECHO = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_first: float | None = None


def watch() -> None:
    """Take over the signals; from the main thread, once a run."""
    global _first
    _first = None
    for number in _SIGNALS:
        signal.signal(number, _handle)


def stop_asked() -> bool:
    """Whether this process has had a signal; ranks have to agree on it."""
    return _first is not None


def release() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_in_loader() -> None:
    """In a loader process: launchers signal all descendants, and the rank still needs its data for the present step."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = now
    elif now - _first > ECHO:
        os._exit(128 + number)
