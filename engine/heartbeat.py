"""Notice within seconds that a rank is gone, name it, and end this one.

Collectives do not: with a rank gone they wait for minutes or fail with a traceback of their own. So every rank keeps
one idle TCP connection to rank 0. If a process ends, its kernel closes the connection at once. If a host or the link to
it fails, keepalive probes go unanswered for SILENCE seconds. The probes are the beat: kernels send and answer them. So
a rank that is busy in a long call is not taken for dead, and nothing is done between the steps. Rank 0 tells all others
whom it has lost. If no other host answers, it says that its own is cut off, and does not blame the first of them.

A rank that leaves on purpose says so first, with its exit code. If that is not 0, the others have GRACE seconds to
leave by themselves, as they do after an error that all ranks know of.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

EXIT_CODE = 69  # EX_UNAVAILABLE of sysexits.h: another rank is gone; start again with --resume
SILENCE = 30  # seconds
GRACE = 8.0
CONNECTING = 30.0
# After a collective has failed, time for the connection to show why: the two notice a dead rank independently.
SETTLING = 3.0
_IDLE, _INTERVAL, _PROBES = 10, 5, 4  # _IDLE + _INTERVAL * _PROBES == SILENCE
_LAST_HEARD = struct.Struct("56xI")


@dataclass(frozen=True)
class Member:
    rank: int
    local_rank: int
    host: str

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.host}"


class _Link:
    """The connection to one other rank. It carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""
        _keep_alive(connection)

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever is gone is noticed when reading
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; ConnectionError if no more will."""
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionResetError(0, "its process has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def silence(self) -> float:
        """Seconds since the other side's kernel was last heard; 0 where the system does not tell."""
        if not sys.platform.startswith("linux"):
            return 0.0
        with contextlib.suppress(OSError):
            # tcpi_last_ack_recv of struct tcp_info, in milliseconds. Answers to probes count.
            return _LAST_HEARD.unpack(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60))[0] / 1000
        return 0.0

    def receive_one(self, deadline: float) -> dict[str, Any]:
        while True:
            self.socket.settimeout(max(0.1, deadline - time.monotonic()))
            if messages := self.receive():
                self.socket.settimeout(None)
                return messages[0]


class _Watch:
    """The thread of a rank. Rank 0 has a link to every other rank, the others have one to rank 0."""

    def __init__(self, me: Member, links: dict[_Link, Member], before_end: Callable[[], None]) -> None:
        self.me, self.links, self._before_end = me, links, before_end
        self.saving = threading.Lock()
        self._leaving = False  # this rank, or another with an error: what ends now is no loss
        os.register_at_fork(after_in_child=self._close)  # or a loader process would keep a dead rank's connection open
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self, code: int) -> None:
        self._leaving = True
        for link in list(self.links):
            link.send({"left": asdict(self.me), "code": code})

    def _close(self) -> None:
        self._leaving = True
        for link in list(self.links):
            link.socket.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for link in self.links:
                selector.register(link.socket, selectors.EVENT_READ, link)
            while self.links:
                for key, _ in selector.select():
                    link = key.data
                    try:
                        messages = link.receive()
                    except (OSError, ValueError) as error:
                        self._lose(self.links[link], getattr(error, "strerror", None) or str(error))
                        messages = [{}]
                    for message in messages:
                        self._hear(message)
                    if messages:  # whatever it was, it is the last one
                        selector.unregister(link.socket)
                        del self.links[link]

    def _hear(self, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._lose(Member(**message["lost"]), str(message["why"]))
        elif message.get("code") and not self._leaving:
            self._leaving = True
            self._tell(message)
            member, code = Member(**message["left"]), int(message["code"])
            sentence = f"{member.label} left with code {code}, and this rank did not: it ends too"
            timer = threading.Timer(GRACE, self._end, (sentence, code, member))
            timer.daemon = True
            timer.start()

    def _lose(self, member: Member, why: str) -> None:
        if not self._leaving:
            self._tell({"lost": asdict(member), "why": why})
            silent = [other for link, other in self.links.items() if link.silence() > _IDLE + _INTERVAL]
            problem = _loss(self.me, member, why, silent, list(self.links.values()))
            self._end(f"{problem}: this run ends; --resume continues it from its last checkpoint", EXIT_CODE, member)

    def _tell(self, message: dict[str, Any]) -> None:
        if self.me.rank == 0:
            for link in list(self.links):
                link.send(message)

    def _end(self, sentence: str, code: int, cause: Member) -> None:
        self.saving.acquire(timeout=GRACE)  # a checkpoint that all ranks have written is finished first
        # One rank of each host speaks; the next one if the first is what was lost.
        first_is_gone = cause.host == self.me.host and cause.local_rank == 0
        if self.me.local_rank == (1 if first_is_gone else 0):
            with contextlib.suppress(OSError):
                print(f"error: {sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # whatever fails now, this process ends
            self._before_end()
        os._exit(code)


def _loss(me: Member, lost: Member, why: str, silent: list[Member], watched: list[Member]) -> str:
    """What has happened. A host that hears no other of several is the one that is cut off."""
    others = {member.host for member in watched} - {me.host}
    answering = {member.host for member in watched if member not in silent and member != lost} - {me.host}
    if len(others) > 1 and lost in silent and not answering:
        return f"none of the {len(others)} other hosts answers {me.host} ({why}), so it seems to be cut off"
    return f"{lost.label} is gone ({why})"


_watch: _Watch | None = None


def start(
    rank: int,
    local_rank: int,
    world: int,
    *,
    broadcast: Callable[[Any], Any],
    gather: Callable[[Any], list[Any]],
    before_end: Callable[[], None],
) -> str | None:
    """Connect to the other ranks and watch them; all ranks call this together. Returns why it cannot be done, if so.

    `broadcast` gives rank 0's value to all ranks, `gather` all values. `before_end` is called before this process ends
    because of another rank.
    """
    global _watch
    if world == 1:
        return None
    me = Member(rank, local_rank, socket.gethostname())
    deadline = time.monotonic() + CONNECTING
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    server, failure, links = None, None, {}
    if rank == 0:
        try:
            server = _listen(address, world)
        except OSError as error:
            failure = f"rank 0 cannot listen ({error.strerror or error})"
    port, token = broadcast((server.getsockname()[1], secrets.token_hex(16)) if server else (None, None))
    try:
        if server is not None:
            links = _accept(server, me, world, token, deadline)
        elif port is not None:
            links = _connect(address, port, me, token, deadline)
    except (OSError, ValueError) as error:
        failure = f"{me.label} has no connection to port {port} of {address} ({error})"
    finally:
        if server is not None:
            server.close()
    failure = next((text for text in gather(failure) if text), None)
    if failure is None:
        _watch = _Watch(me, links, before_end)
    return failure


def stop(code: int) -> None:
    """Leave on purpose. Call this before the process ends."""
    global _watch
    if _watch is not None:
        _watch.stop(code)
        _watch = None


def settle() -> None:
    """Wait a moment after an unexpected error: if a lost rank is its reason, this process ends with that sentence."""
    if _watch is not None:
        time.sleep(SETTLING)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """What is done inside is finished before this process ends because of another rank."""
    if _watch is None:
        yield
    else:
        with _watch.saving:
            yield


def _listen(address: str, world: int) -> socket.socket:
    """Ranks of one host meet on the loopback device, which no one else reaches."""
    loopback = address == "localhost" or address.startswith("127.")
    if not loopback and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be there and switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world)
    return socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=world)


def _accept(server: socket.socket, me: Member, world: int, token: str, deadline: float) -> dict[_Link, Member]:
    links: dict[_Link, Member] = {}
    while len(links) < world - 1:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        link = _Link(server.accept()[0])
        # Whoever does not know the token is no rank of this run. A rank greets at once, so nobody can hold us up.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            hello = link.receive_one(min(deadline, time.monotonic() + 5))
            if hmac.compare_digest(str(hello.pop("token")), token):
                links[link] = Member(**hello)
                link.send(asdict(me))
                continue
        link.socket.close()
    return links


def _connect(address: str, port: int, me: Member, token: str, deadline: float) -> dict[_Link, Member]:
    host = "127.0.0.1" if address == "localhost" else address
    link = _Link(socket.create_connection((host, port), timeout=CONNECTING))
    link.send({"token": token, **asdict(me)})
    return {link: Member(**link.receive_one(deadline))}


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)  # macOS has another name
    for name, value in (
        (idle, _IDLE),
        (getattr(socket, "TCP_KEEPINTVL", None), _INTERVAL),
        (getattr(socket, "TCP_KEEPCNT", None), _PROBES),
        (getattr(socket, "TCP_USER_TIMEOUT", None), SILENCE * 1000),
    ):
        if name is not None:
            connection.setsockopt(socket.IPPROTO_TCP, name, value)
