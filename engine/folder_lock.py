"""One run per folder: a file that names the run which works there.

It holds on a file system that several hosts share, where flock may not: the file is written under a name of its own and
then linked to the lock's name, which succeeds for one host only. The holder renews the file's time.

A lock outlives a crash, so it is judged before it is obeyed. On this host it is void if its process is gone. On another
host it is void if it was not renewed for STALE seconds, by the clock of the file system. Whoever finds a younger one
waits until it is renewed (then the folder is refused) or too old. A holder that finds the lock in other hands ends its
process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from engine.errors import UserError

NAME = "run.lock"
RENEWED = 10.0  # seconds between two renewals
STALE = 120.0
LOST = 2  # exit code of a process whose lock another run has taken
_DRAFT = f".{NAME}."  # the beginning of the names under which locks are written


class InUse(UserError):
    """Another run works in the folder."""


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    started: str  # of the process, to tell it from a later one with its number
    place: str  # host, boot and process namespace: where the number means something
    since: str
    token: str

    @property
    def label(self) -> str:
        return f"host {self.host}, process {self.pid}, since {self.since}"

    def is_here(self) -> bool:
        return self.place == _place()

    def is_alive(self) -> bool:
        """Only for a process that is here."""
        return _started(self.pid) == self.started


@dataclass(frozen=True)
class _Found:
    holder: Holder | None  # None if the file does not say
    renewed: float


class _Lock:
    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.owner = os.getpid()
        pid = os.getpid()
        self.holder = Holder(
            host=socket.gethostname(),
            pid=pid,
            started=_started(pid) or "",
            place=_place(),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            token=secrets.token_hex(8),
        )
        self._ended = threading.Event()

    def take(self, say: Callable[[str], None]) -> None:
        """Become the holder; InUse if another run is, OSError if the folder cannot be written."""
        seen: float | None = None
        while (now := self._create()) is not None:
            found = _read(self.path)
            if found is None:  # it was released meanwhile
                continue
            other = found.holder
            if other is not None and other.is_here():
                void = not other.is_alive()
                renewed = not void
            else:
                void = now - found.renewed > STALE
                renewed = seen is not None and found.renewed != seen
            if renewed:
                raise InUse(
                    f"{self.path.parent} is in use by another run ({other.label if other else self.path}): wait for "
                    "it, stop it, or choose another folder"
                )
            if void:
                self._remove(other)
                continue
            if seen is None:
                seen = found.renewed
                say(
                    f"lock    {self.path} is of another run ({other.label if other else 'unknown'}): waiting for a "
                    f"sign of life, at most {STALE:.0f} s"
                )
            time.sleep(1)
        self._sweep()
        threading.Thread(target=self._renew, name="folder lock", daemon=True).start()

    def release(self) -> None:
        self._ended.set()
        if self.owner == os.getpid():  # a forked process is not the holder
            with contextlib.suppress(OSError):
                if _is(self.path, self.holder):
                    self.path.unlink()

    def _create(self) -> float | None:
        """None if the lock is ours now; otherwise the time by the file system's clock."""
        draft = self.path.with_name(_DRAFT + self.holder.token)
        try:
            draft.write_text(json.dumps(asdict(self.holder)) + "\n")
            now = draft.stat().st_mtime
            try:
                os.link(draft, self.path)
                return None
            except FileExistsError:
                # The answer to a request that was sent twice (NFS) may be wrong: two names tell.
                return None if draft.stat().st_nlink == 2 else now
            except OSError:  # a file system without links
                return None if self._create_alone() else now
        finally:
            draft.unlink(missing_ok=True)

    def _create_alone(self) -> bool:
        try:
            with open(self.path, "x") as file:
                file.write(json.dumps(asdict(self.holder)) + "\n")
            return True
        except FileExistsError:
            return False

    def _remove(self, void: Holder | None) -> None:
        """Remove a void lock. Of several that try, one renames it; what was not void after all is put back."""
        aside = self.path.with_name(f"{_DRAFT}{self.holder.token}.void")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if not _is(aside, void):
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove drafts of starts that were killed."""
        for draft in self.path.parent.glob(f"{_DRAFT}*"):
            with contextlib.suppress(OSError):
                if self.path.stat().st_mtime - draft.stat().st_mtime > STALE:
                    draft.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            with contextlib.suppress(OSError):
                found = _read(self.path)
                if found is None or found.holder is None:
                    if self.path.parent.is_dir() and not self._ended.is_set():  # somebody has removed it
                        self._create()
                elif found.holder.token == self.holder.token:
                    os.utime(self.path)
                elif not self._ended.is_set():
                    self._give_way(found.holder)

    def _give_way(self, other: Holder) -> None:
        print(
            f"error: {self.path.parent} was taken over by another run ({other.label}), because this one did not renew "
            f"{NAME} for {STALE:.0f} s: this run ends here",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST)


_held: dict[Path, _Lock] = {}


def hold(folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Hold the folder until `release_all` or the end of this process; InUse if another process holds it."""
    folder = folder.resolve()
    if folder not in _held or _held[folder].owner != os.getpid():
        lock = _Lock(folder)
        lock.take(say)
        _held[folder] = lock


def release_all() -> None:
    for lock in list(_held.values()):
        lock.release()
    _held.clear()


atexit.register(release_all)


def is_lock(path: Path) -> bool:
    """Whether a file belongs to the lock of its folder."""
    return path.name == NAME or path.name.startswith(_DRAFT)


def _read(path: Path) -> _Found | None:
    """What the file says, and when it was renewed; None without a file. Opened, because NFS then asks the server."""
    try:
        with open(path) as file:
            renewed = os.fstat(file.fileno()).st_mtime
            text = file.read(10_000)
    except FileNotFoundError:
        return None
    try:
        return _Found(Holder(**json.loads(text)), renewed)
    except (ValueError, TypeError):
        return _Found(None, renewed)


def _is(path: Path, holder: Holder | None) -> bool:
    found = _read(path)
    return found is not None and found.holder == holder


def _place() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """When a process began, in a form to compare; None if it is gone or only waits for its parent to notice."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else fields[18]  # in ticks since the boot, which no change of the clock moves
    except (OSError, ValueError, IndexError):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else str(int(process.create_time()))
        return None
