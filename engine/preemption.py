"""SIGTERM and SIGUSR1, which schedulers send before they take a machine away: save a checkpoint, then exit.

The first signal asks for a stop after the current step. A later one ends the process at once. Launchers forward a
signal to ranks that already received it (DeepSpeed's launcher does so rank by rank), so a signal within ECHO seconds of
the first counts as the same one.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped early and saved; start again with --resume
NUMBER = int(signal.SIGTERM)
ECHO = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_first: float | None = None


def watch() -> None:
    """Handle the signals from now on. Call this in the main thread, once per run."""
    global _first
    _first = None
    for number in _SIGNALS:
        signal.signal(number, _handle)


def stop_asked() -> bool:
    """Whether this process received a signal. Other ranks may not have received one."""
    return _first is not None


def release() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_in_loader() -> None:
    """Ignore the signals in a loader process: its rank still needs data for the current step."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    global _first
    now = time.monotonic()
    if _first is None:
        _first = now
    elif now - _first > ECHO:
        os._exit(128 + number)
