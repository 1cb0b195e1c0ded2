"""No check hangs: if a rank fails where the others wait for it in a collective, they learn of it and end.

A rank that fails posts its error on a board, a small store of torch's beside the process groups. A thread on every rank
reads it. Ranks that are still in the check GRACE seconds later wait in a collective that will never complete. The same
happens without an error when a check takes longer than its limit: then the network or a device hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from engine import distributed
from engine.errors import first_line

GRACE = 20.0
_POLL = 0.5


class Board:
    """Errors of ranks, readable by all while collectives hang. Build it on all ranks together.

    Without one (a firewall may let only MASTER_PORT through) a hang ends at the limit, and nobody is named.
    """

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self.problem: str | None = None
        if distributed.world_size() > 1:
            self._connect(os.environ.get("MASTER_ADDR", "127.0.0.1"))

    def _connect(self, address: str) -> None:
        store, problem = None, None
        try:
            store = _open(address, 0, server=True) if distributed.rank() == 0 else None
        except (RuntimeError, OSError) as error:
            problem = first_line(error)
        port = distributed.broadcast_object(store.port if store is not None else None)
        try:
            if distributed.rank() and port is not None:
                store = _open(address, port, server=False)
        except (RuntimeError, OSError) as error:
            problem = f"rank {distributed.rank()} has no connection to port {port} of {address} ({first_line(error)})"
        self.problem = next((text for text in distributed.all_gather_objects(problem) if text), None)
        self._store = store if self.problem is None else None

    def post(self, check: str, text: str) -> None:
        if self._store is not None:
            self._store.set(check, f"rank {distributed.rank()}: {text}")

    def read(self, check: str) -> str | None:
        if self._store is None or not self._store.check([check]):
            return None
        return self._store.get(check).decode()


def _open(address: str, port: int, *, server: bool) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=server, wait_for_workers=False, timeout=timedelta(seconds=30))


class Watchdog:
    """Calls `end(check, reason)` in a thread of its own, once, when a check hangs. It must end the process."""

    def __init__(self, end: Callable[[str, str], None], *, limit: float) -> None:
        self.board: Board | None = None  # until the ranks have met, only the time is watched
        self._end, self._limit = end, limit
        self._current: tuple[str, float] | None = None
        threading.Thread(target=self._run, name="doctor-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def watching(self, check: str) -> Iterator[None]:
        self._current = (check, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def _run(self) -> None:
        failed: dict[str, float] = {}  # checks in which a rank failed, and when this rank saw it
        while True:
            time.sleep(_POLL)
            current, board = self._current, self.board
            if current is None:
                continue
            check, began = current
            text = None
            if board is not None:
                with contextlib.suppress(RuntimeError):  # the store ends with rank 0, which the heartbeat notices
                    text = board.read(check)
            if text is not None and time.monotonic() - failed.setdefault(check, time.monotonic()) > GRACE:
                reason = f"{text} (the other ranks waited for it)"
            elif time.monotonic() - began > self._limit:
                reason = f"did not end within {self._limit:.0f} s"
            else:
                continue
            if self._current is current:
                self._end(check, reason)
                return
