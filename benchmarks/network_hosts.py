"""Several "hosts" on one machine: network namespaces with names, addresses, sshds and a network of their own.

  with NetworkHosts(2) as hosts:
      hosts.start(0, ["hostname"]).wait()

A host is a network namespace with one device, `eth0`, a host name (a UTS namespace) and an `/etc/hosts`. Nothing leads
out of it: the devices meet on a bridge in one more namespace. They share the file system, as nodes of a cluster share
a work dir. Linux and root are needed.

A delay needs another network. Not every kernel has `netem`, so a process of ours holds TAP devices instead of the
bridge, passes every frame on after the delay, and loses some if asked to. Its delay can be changed while a run goes on.
Every frame waits, so a round trip takes twice the delay.

Everything is removed at the end, also after an error or SIGTERM. What a killed process left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NETWORK = "10.77.0."  # private, and seen in the namespaces only
PREFIX = "gigadet"
NAMESPACES, ETC = Path("/run/netns"), Path("/etc/netns")
SSHD_FOLDER = Path("/run/sshd")  # sshd does not start without it
FRAME = 65536


def why_not() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, hostname)"
    name = f"{PREFIX}{os.getpid()}-try"
    tries = (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", name, "link", "add", "port0", "type", "veth", "peer", "name", "port1"],
        ["ip", "netns", "exec", name, "unshare", "--uts", "true"],
    )
    try:
        for command in tries:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"`{' '.join(command)}` failed: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


def ssh_missing() -> list[str]:
    """What `deepspeed --hostfile` needs and is not installed."""
    return [tool for tool in ("ssh", "/usr/sbin/sshd", "ssh-keygen", "pdsh") if shutil.which(tool) is None]


class NetworkHosts:
    """Hosts `node1` to `nodeN`. `delay` is None (a bridge) or seconds one way, `loss` a part of the frames."""

    def __init__(
        self, count: int, *, delay: float | None = None, loss: float = 0.0, ssh: bool = False, debian: bool = False
    ) -> None:
        """`ssh`: an sshd on every host. `debian`: a host's own name means 127.0.1.1, as Debian's installer has it."""
        self.names = [f"node{number + 1}" for number in range(count)]
        self.addresses = [f"{NETWORK}{number + 1}" for number in range(count)]
        self._first_delay, self._loss, self._ssh, self._debian = delay, loss, ssh, debian
        self._tag = f"{PREFIX}{os.getpid()}-"
        self._switch: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._handlers: dict[int, Any] = {}
        self._made_sshd_folder = False

    def __enter__(self) -> NetworkHosts:
        reason = why_not()
        if reason is not None:
            raise SystemExit(f"error: {reason}")
        if self._ssh and ssh_missing():
            raise SystemExit(f"error: not installed: {', '.join(ssh_missing())} (Debian: openssh-server, pdsh)")
        remove_leftovers()
        for number in (signal.SIGTERM, signal.SIGHUP):  # an exception in the main thread, so that __exit__ is reached
            self._handlers[number] = signal.signal(number, _leave)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-hosts-"))
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):  # removing is not interrupted
            signal.signal(number, signal.SIG_IGN)
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        _remove(self._tag)
        for process in self._started:
            process.wait()
        if self._made_sshd_folder:
            with contextlib.suppress(OSError):
                SSHD_FOLDER.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # ---------------------------------------------------------------- what a host is for

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host]]
        return ["ip", "netns", "exec", self._namespace(host), *named, *command]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(self.inside(host, command), **options)
        self._started.append(process)
        return process

    def pids(self, host: int) -> list[int]:
        """The processes on a host, but for its sshd."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split() if "sshd" not in _command(int(pid))]

    def environment(self) -> dict[str, str]:
        """For processes on the hosts: no variables of a launcher, and an `ssh` that knows the hosts' keys only."""
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
        kept = {key: value for key, value in os.environ.items() if key not in launchers}
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    # ---------------------------------------------------------------- the network

    def cut(self, host: int) -> None:
        """Lose every frame from and to a host, for good. Nobody is told: `eth0` stays up."""
        if self._switch is None:
            _ip("-n", self._bridge, "link", "set", f"port{host}", "nomaster")
        else:
            self._tell(f"cut {host}")

    def restore(self, host: int) -> None:
        if self._switch is None:
            _ip("-n", self._bridge, "link", "set", f"port{host}", "master", "br0")
        else:
            self._tell(f"restore {host}")

    def delay(self, seconds: float) -> None:
        """Every frame waits that long from now on."""
        if self._switch is None:
            raise ValueError("these hosts were made without a delay")
        self._tell(f"delay {seconds}")

    def round_trip(self, tries: int = 21) -> float:
        """The median time of a small TCP message from the second host to the first and back, in seconds."""
        server = self.start(0, [sys.executable, "-c", ECHO, self.addresses[0]])
        try:
            command = self.inside(1, [sys.executable, "-c", PING, self.addresses[0], str(tries)])
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        finally:
            server.kill()

    # ---------------------------------------------------------------- building

    def _namespace(self, host: int) -> str:
        return f"{self._tag}{self.names[host]}"

    @property
    def _bridge(self) -> str:
        return f"{self._tag}bridge"

    def _build(self) -> None:
        for host, name in enumerate(self.names):
            _ip("netns", "add", self._namespace(host))
            etc = ETC / self._namespace(host)
            etc.mkdir(parents=True)
            others = [f"{a} {n}" for a, n in zip(self.addresses, self.names) if n != name or not self._debian]
            own = [f"127.0.1.1 {name}"] if self._debian else []
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *others, ""]))
            (etc / "resolv.conf").write_text("")  # no name server can be reached
        if self._first_delay is None and not self._loss:
            self._build_bridge()
        else:
            self._build_switch()
        for host, address in enumerate(self.addresses):
            inside = ("-n", self._namespace(host))
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            if self._switch is not None:
                self._open_windows(host)
        if self._ssh:
            self._start_sshds()

    def _build_bridge(self) -> None:
        inside = ("-n", self._bridge)
        _ip("netns", "add", self._bridge)
        _ip(*inside, "link", "add", "br0", "type", "bridge")
        _ip(*inside, "link", "set", "br0", "up")
        for host in range(len(self.names)):
            port, namespace = f"port{host}", self._namespace(host)
            _ip(*inside, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip(*inside, "link", "set", port, "master", "br0")
            _ip(*inside, "link", "set", port, "up")

    def _build_switch(self) -> None:
        spaces = [self._namespace(host) for host in range(len(self.names))]
        command = [sys.executable, __file__, "switch", str(self._first_delay or 0.0), str(self._loss), *spaces]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise SystemExit("error: the switch could not open its TAP devices (/dev/net/tun)")

    def _open_windows(self, host: int) -> None:
        """TCP sends whole messages at once, not a window per round trip: what is counted is who waits for whom."""
        space = self._namespace(host)
        _ip("-n", space, "link", "set", "eth0", "mtu", "9000")
        _ip("-n", space, "route", "change", f"{NETWORK}0/24", "dev", "eth0", "initcwnd", "2000", "initrwnd", "2000")
        buffers = "4096 16777216 67108864"
        for key, value in (("slow_start_after_idle", "0"), ("rmem", buffers), ("wmem", buffers)):
            write = ["sh", "-c", 'echo "$1" > /proc/sys/net/ipv4/tcp_"$0"', key, value]
            subprocess.run(["ip", "netns", "exec", space, *write], check=True)

    def _tell(self, command: str) -> None:
        assert self._switch is not None and self._switch.stdin is not None
        self._switch.stdin.write(command + "\n")
        self._switch.stdin.flush()

    def _start_sshds(self) -> None:
        """One key for all hosts and users, in our own folder. ~/.ssh is neither read nor written."""
        key = self.folder / "key"
        quiet = dict(check=True, capture_output=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], **quiet)
        client = self.folder / "ssh_config"
        client.write_text(
            f"IdentityFile {key}\nIdentitiesOnly yes\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
            "LogLevel ERROR\nBatchMode yes\nServerAliveInterval 10\nServerAliveCountMax 3\n"
        )
        (self.folder / "bin").mkdir()
        ssh = self.folder / "bin" / "ssh"  # pdsh and DeepSpeed call `ssh` by its name
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
        ssh.chmod(0o755)
        if not SSHD_FOLDER.exists():
            SSHD_FOLDER.mkdir()
            self._made_sshd_folder = True
        for host, address in enumerate(self.addresses):
            config = self.folder / f"sshd_config_{self.names[host]}"
            config.write_text(
                f"ListenAddress {address}\nHostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nUsePAM no\n"
                "PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nPrintMotd no\nMaxStartups 100\n"
                "ClientAliveInterval 10\nClientAliveCountMax 3\n"
            )
            log = (self.folder / f"sshd_{self.names[host]}.log").open("w")
            self.start(host, ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], stderr=log)
            log.close()
        for host in range(len(self.names)):
            self._wait_for_ssh(host)

    def _wait_for_ssh(self, host: int) -> None:
        command = self.inside(0, ["ssh", self.names[host], "hostname"])
        deadline = time.monotonic() + 20
        while True:
            done = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
            if done.stdout.strip() == self.names[host]:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"error: no ssh to {self.names[host]}: {done.stderr.strip()}")
            time.sleep(0.2)


ECHO = """
import socket, sys
peer = socket.create_server((sys.argv[1], 7)).accept()[0]
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(64):
    peer.sendall(data)
"""
PING = """
import socket, statistics, sys, time
for _ in range(100):
    try:
        peer = socket.create_connection((sys.argv[1], 7))
        break
    except OSError:
        time.sleep(0.1)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(64)
    took.append(time.perf_counter() - began)
print(statistics.median(took))
"""


def remove_leftovers() -> list[str]:
    """Remove the hosts of processes that are gone; their names."""
    tags = {
        found.group()
        for place in (NAMESPACES, ETC)
        if place.exists()
        for entry in place.iterdir()
        if (found := re.match(rf"{PREFIX}(\d+)-", entry.name)) and not Path(f"/proc/{found.group(1)}").exists()
    }
    return [name for tag in sorted(tags) for name in _remove(tag)]


def _remove(tag: str) -> list[str]:
    """Remove namespaces by their names' beginning, with the processes in them."""
    names = sorted(path.name for path in NAMESPACES.glob(f"{tag}*")) if NAMESPACES.exists() else []
    for name in names:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.05)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for path in ETC.glob(f"{tag}*") if ETC.exists() else ():
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may have theirs there
        ETC.rmdir()
    return names


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: `ip {' '.join(arguments)}` failed: {done.stderr.strip()}")


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


# -------------------------------------------------------------------- the switch: a process of its own


def switch(delay: float, loss: float, namespaces: Sequence[str]) -> None:
    """Pass frames between the namespaces' `eth0` until standard input ends, which is also where commands come from."""
    ports = list(_open_taps(namespaces))
    chance = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # when, to which port, what
    owner: dict[bytes, int] = {}  # hardware addresses, learned as a switch does
    cut: set[int] = set()
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, port, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a device that is not up
                os.write(ports[port], frame)
            now = time.monotonic()
        # select, because it waits for microseconds; poll and epoll count milliseconds.
        readable, _, _ = select.select([*ports, 0], [], [], max(0.0, waiting[0][0] - now) if waiting else None)
        now = time.monotonic()
        for port, descriptor in enumerate(ports):
            if descriptor not in readable:
                continue
            with contextlib.suppress(OSError):
                while True:
                    frame = os.read(descriptor, FRAME)
                    owner[frame[6:12]] = port
                    aim = owner.get(frame[:6])
                    for other in range(len(ports)) if aim is None else (aim,):
                        if other != port and not cut & {port, other} and chance.random() >= loss:
                            # In order, also after the delay has become shorter.
                            due = max(now + delay, waiting[-1][0] if waiting else 0.0)
                            waiting.append((due, other, frame))
        if 0 in readable:
            line = os.read(0, 1000)
            if not line:
                return
            for command in line.decode().splitlines():
                word, value = command.split()
                if word == "delay":
                    delay = float(value)
                elif word == "cut":
                    cut.add(int(value))
                else:
                    cut.discard(int(value))


def _open_taps(namespaces: Sequence[str]) -> Iterator[int]:
    """A TAP device belongs to the namespace in which it is opened, and can be read from any."""
    enter_network = ctypes.CDLL(None, use_errno=True).setns  # os.setns came with Python 3.12
    for namespace in namespaces:
        with open(NAMESPACES / namespace) as place:
            if enter_network(place.fileno(), 0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        # TUNSETIFF with IFF_TAP | IFF_NO_PI: plain Ethernet frames.
        fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", b"eth0", 0x0002 | 0x1000))
        yield descriptor


if __name__ == "__main__":
    if sys.argv[1:2] != ["switch"]:
        raise SystemExit("This is a module: see python benchmarks/hosts.py --help")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the process that builds the hosts
    switch(float(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
