"""A rank that is gone: all others end within seconds, one of them says who it was. Real processes, without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import heartbeat
from engine.heartbeat import Member

ROOT = Path(__file__).parents[2]
# Forks ranks that watch each other and then do what their line of the plan says. Their codes are printed at the end.
RANKS = """
import json, multiprocessing, os, subprocess, sys, time
from engine import heartbeat

world, plan = int(sys.argv[1]), json.loads(sys.argv[2])
heartbeat.GRACE = 0.5
queues = [multiprocessing.SimpleQueue() for _ in range(world)]

def gather(rank, value):
    queues[0].put((rank, value))
    if rank == 0:
        values = [value for _, value in sorted(queues[0].get() for _ in range(world))]
        for queue in queues[1:]:
            queue.put(values)
        return values
    return queues[rank].get()

def live(rank):
    def gathered(value):
        return gather(rank, value)

    problem = heartbeat.start(
        rank, rank, world, broadcast=lambda value: gathered(value)[0], gather=gathered,
        before_end=lambda: print(f"rank {rank} cleaned up", flush=True),
    )
    assert problem is None, problem
    gathered(None)
    act = plan.get(str(rank), "stay")
    if act == "die with a loader":
        if os.fork() == 0:
            time.sleep(20)
        os.kill(os.getpid(), 9)
    elif act == "die":
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    elif act == "finish a file":
        with heartbeat.finishing():
            time.sleep(0.6)
            print("finished", flush=True)
    elif act.startswith("leave"):
        heartbeat.stop(int(act[5:]))
        os._exit(int(act[5:]))
    time.sleep(2 if "leave 0" in plan.values() else 20)
    heartbeat.stop(0)
    os._exit(0)

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=live, args=(rank,)) for rank in range(world)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
print(json.dumps([rank.exitcode for rank in ranks]), flush=True)
os._exit(0)
"""


def outcome(world: int, **plan: str) -> tuple[list[int], str, list[str], float]:
    """Exit codes, output, sentences and seconds of ranks of which `rank0=...` does something."""
    began = time.monotonic()
    acts = json.dumps({name.removeprefix("rank"): act for name, act in plan.items()})
    done = subprocess.Popen(
        [sys.executable, "-c", RANKS, str(world), acts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
        start_new_session=True,
    )
    lines: list[str] = []
    assert done.stdout is not None and done.stderr is not None
    for line in done.stdout:  # not to the end of the output, which a loader process may hold open
        lines.append(line)
        if line.startswith("["):
            break
    seconds = time.monotonic() - began
    os.killpg(done.pid, signal.SIGKILL)
    errors = done.stderr.read()
    assert lines, errors
    return json.loads(lines[-1]), "".join(lines), errors.splitlines(), seconds


def gone(rank: int) -> str:
    name = re.escape(socket.gethostname())
    return (
        rf"error: rank {rank} on {name} is gone \(.*\): this run ends; --resume continues it from its last checkpoint"
    )


def test_all_ranks_end_when_one_is_killed_and_one_says_so():
    codes, output, errors, seconds = outcome(3, rank2="die with a loader")
    assert codes == [69, 69, -9] and seconds < 5
    assert len(errors) == 1 and re.fullmatch(gone(2), errors[0]), errors
    assert output.count("cleaned up") == 2


def test_rank_0_may_be_the_one():
    codes, _, errors, seconds = outcome(3, rank0="die")
    assert codes == [-9, 69, 69] and seconds < 5
    assert len(errors) == 1 and re.fullmatch(gone(0), errors[0]), errors


def test_a_rank_that_is_done_may_leave():
    codes, _, errors, _ = outcome(3, rank0="leave 0", rank1="leave 0")
    assert codes == [0, 0, 0] and errors == []


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_with_an_error_takes_the_others_along(who):
    codes, _, errors, seconds = outcome(3, **{f"rank{who}": "leave 2"})
    assert codes == [2, 2, 2] and seconds < 5
    assert len(errors) == 1 and f"rank {who} on" in errors[0] and "left with code 2, and this rank did not" in errors[0]


def test_what_is_being_finished_is_finished():
    codes, output, errors, _ = outcome(2, rank0="finish a file", rank1="die")
    assert "finished" in output and codes in ([69, -9], [0, -9]), (codes, output, errors)


def test_strangers_are_turned_away():
    server = heartbeat._listen("127.0.0.1", 2)
    port = server.getsockname()[1]
    member = Member(1, 1, "node2")

    def visit() -> None:
        for greeting in (
            b"GET / HTTP/1.1\r\n\r\n",
            b'{"token": "wrong", "rank": 1, "local_rank": 1, "host": "x"}\n',
            b"",
        ):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
                if greeting:
                    stranger.recv(100)
        heartbeat._connect("127.0.0.1", port, member, "secret", time.monotonic() + 5)

    visitors = threading.Thread(target=visit, daemon=True)
    visitors.start()
    links = heartbeat._accept(server, Member(0, 0, "node1"), 2, "secret", time.monotonic() + 10)
    visitors.join(5)
    server.close()
    assert list(links.values()) == [member]


def test_the_kernel_notices_a_host_that_is_silent():
    """The settings of the probes; tests/launch/test_hosts.py cuts a link."""
    server = heartbeat._listen("localhost", 2)
    assert server.getsockname()[0] == "127.0.0.1"  # nobody else can reach it
    link = heartbeat._Link(socket.create_connection(server.getsockname()))
    options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
    idle, interval, probes = (link.socket.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert idle + interval * probes == heartbeat.SILENCE == 30
    link.socket.close()
    server.close()


def test_a_link_knows_when_it_was_last_heard():
    server = heartbeat._listen("localhost", 2)
    link = heartbeat._Link(socket.create_connection(server.getsockname()))
    link.send({"a": "message, which the other kernel acknowledges"})
    time.sleep(0.4)
    if sys.platform.startswith("linux"):
        assert 0.3 < link.silence() < 5
    link.socket.close()
    assert link.silence() == 0
    server.close()


def test_a_host_that_hears_no_other_does_not_blame_one_of_them():
    me, neighbour = Member(0, 0, "node1"), Member(1, 1, "node1")
    second, third = Member(2, 0, "node2"), Member(3, 0, "node3")
    everyone = [neighbour, second, third]

    def sentence(silent: list[Member], watched: list[Member] = everyone) -> str:
        return heartbeat._loss(me, second, "Connection timed out", silent, watched)

    assert sentence([second]) == "rank 2 on node2 is gone (Connection timed out)"
    assert "none of the 2 other hosts answers node1" in sentence([second, third])
    assert "rank 2 on node2" in sentence([third])  # its process has ended: it did answer
    assert "rank 2 on node2" in sentence([second], [neighbour, second])  # of two hosts, either may be cut off
