"""Run training on several hosts that are network namespaces of this machine, and measure what a network does to it.

  python benchmarks/hosts.py train --hosts 2 --launcher torchrun -- --config my.json --work-dir /tmp/w
  python benchmarks/hosts.py same      # deepspeed --hostfile and torchrun on 1, 2 and 4 hosts: the same weights?
  python benchmarks/hosts.py delay     # seconds per step against the delay: the slope is the number of round trips
  python benchmarks/hosts.py messages  # which collectives a step waits for, and who called them
  python benchmarks/hosts.py cut       # lose a host during a step: who ends when, and what is said; then resume
  python benchmarks/hosts.py check     # whether this machine allows all this; if not, why (exit code 1)
  python benchmarks/hosts.py remove    # what a killed process left behind (otherwise nothing stays)

`--repo PATH` runs the code of another checkout, to compare two versions. Linux, root and iproute2 are needed;
`--launcher deepspeed` also needs openssh-server and pdsh. Nothing reaches another machine, and ~/.ssh is not used.
Every host has the name nodeI and the address 10.77.0.I, and all see the files of this machine (network_hosts.py).

All delays are one way: a round trip takes twice as long. Only one process per core makes fair times; so the hosts have
one rank each, and the times of a busy machine are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from network_hosts import NetworkHosts, remove_leftovers, ssh_missing, why_not

ROOT = Path(__file__).parents[1]
PORT = "29500"  # free in every namespace
LIMIT = 60.0  # seconds in which a run must end that lost a host


def settings(*, steps: int, accumulation: int = 1, ranks: int = 2, stage: int = 2, batch: int | None = None) -> dict:
    """A RetinaNet of 48 tensors with group norm and SGD, which makes runs comparable to the last bits."""
    total = batch or ranks * accumulation
    options = {
        "backbone.base_channels": 8,
        "backbone.num_stages": 2,
        "backbone.strides": [1, 2],
        "backbone.dilations": [1, 1],
        "backbone.out_indices": [0, 1],
        "backbone.norm_cfg": {"type": "GN", "num_groups": 4},
        "neck.in_channels": [8, 16],
        "neck.start_level": 0,
        "neck.out_channels": 16,
        "bbox_head.in_channels": 16,
        "bbox_head.feat_channels": 16,
        "bbox_head.stacked_convs": 1,
        "bbox_head.norm_cfg.num_groups": 4,
        "bbox_head.anchor_generator.strides": [4, 8, 16],
    }
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "detector": {"config": "tiny_retinanet", "options": options},
        "data": {
            "dataset": "shapes",
            "shapes": {"train_images": 16, "val_images": 4, "image_size": 64},
            "scale": [64, 64],
            "workers": 0,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}},
        "schedule": {"steps": steps, "warmup_steps": 1, "decay": "constant"},
        "run": {"seed": 3, "eval_interval": 0, "checkpoint_interval": 0, "log_interval": 1000},
    }


class Launch:
    """A training run on hosts: one launcher per host, or DeepSpeed's on the first, which reaches the others by ssh."""

    def __init__(
        self,
        hosts: NetworkHosts,
        launcher: str,
        arguments: Sequence[str],
        *,
        repo: Path = ROOT,
        places: Sequence[int] | None = None,
        per_host: int = 1,
        script: Path | None = None,
        log: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        places = range(len(hosts.names)) if places is None else places
        self.log = log or hosts.folder / "log"
        self.places, self._hosts = list(places), hosts
        command = [str(script or repo / "launch" / "train.py"), *arguments]
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo), "PYTHONUNBUFFERED": "1", **(variables or {})}
        environment = {**hosts.environment(), **more}
        # DeepSpeed passes on what is in this file, of its working folder, and variables that begin with PYTHON.
        (hosts.folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in more.items()))
        starts = {}
        if launcher == "deepspeed":
            hostfile = hosts.folder / "hostfile"
            hostfile.write_text("".join(f"{hosts.names[place]} slots={per_host}\n" for place in places))
            multi = ["--force_multi"] if len(self.places) == 1 else []
            starts[self.places[0]] = [
                str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile), "--master_port", PORT,
                *multi,
            ]  # fmt: skip
        else:
            for number, place in enumerate(places):
                starts[place] = [
                    "-m", "torch.distributed.run", "--nnodes", str(len(self.places)), "--node-rank", str(number),
                    "--nproc-per-node", str(per_host), "--master-addr", hosts.addresses[self.places[0]],
                    "--master-port", PORT,
                ]  # fmt: skip
        with self.log.open("w") as output:
            self.processes = [
                hosts.start(
                    place,
                    [sys.executable, *start, *command],
                    cwd=hosts.folder,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for place, start in starts.items()
            ]

    def wait(self, limit: float = 300) -> None:
        """Until it has ended well; otherwise an error with what it printed."""
        deadline = time.monotonic() + limit
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        codes = [process.poll() for process in self.processes]
        if any(codes):
            raise SystemExit(
                f"{self.log.read_text()}\nerror: the launchers' exit codes are {codes} (None: still there)"
            )

    def running(self, place: int) -> list[int]:
        return self._hosts.pids(place)

    def kill(self) -> None:
        """End everything on the hosts but sshd."""
        for place in self.places:
            for pid in self.running(place):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        for process in self.processes:
            process.wait()

    def wait_for_step(self, work: Path, step: int, limit: float = 240) -> None:
        deadline = time.monotonic() + limit
        while last_step(work) < step:
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes):
                raise SystemExit(f"{self.log.read_text()}\nerror: step {step} was not reached")
            time.sleep(0.05)


def records(work: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        lines = (work / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be half written
        return [json.loads(line) for line in lines]
    return []


def last_step(work: Path) -> int:
    return max((int(record["step"]) for record in records(work)), default=0)


@contextlib.contextmanager
def folder_of(given: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """A config file and a work dir, for as long as they are needed."""
    with tempfile.TemporaryDirectory(prefix="gigadet-hosts-run-") as name:
        folder = Path(name)
        (folder / "run.json").write_text(json.dumps(given))
        yield folder / "run.json", folder / "work"


# -------------------------------------------------------------------- train


def train(options: argparse.Namespace) -> None:
    with NetworkHosts(
        options.hosts,
        delay=options.delay,
        loss=options.loss,
        ssh=options.launcher == "deepspeed",
        debian=options.debian,
    ) as hosts:
        run = Launch(hosts, options.launcher, options.arguments, repo=options.repo, per_host=options.ranks)
        try:
            run.wait(options.limit)
        finally:
            print(run.log.read_text(), end="", flush=True)


# -------------------------------------------------------------------- same


def same(options: argparse.Namespace) -> None:
    """Four micro-batches on one, two and four hosts reach the same weights."""
    cases = [("torchrun", 1, 4), ("torchrun", 1, 2), ("torchrun", 2, 1), ("deepspeed", 2, 1), ("deepspeed", 4, 1)]
    weights: dict[tuple[str, int, int], dict[str, Any]] = {}
    print("| launcher | hosts | ranks per host | greatest difference from the same ranks on one host |")
    print("|---|---|---|---|")
    for launcher, count, per_host in cases:
        given = settings(steps=6, batch=4, stage=options.stage)
        given["run"]["checkpoint_interval"] = None
        with folder_of(given) as (config, work), NetworkHosts(count, ssh=launcher == "deepspeed") as hosts:
            arguments = ["--config", str(config), "--work-dir", str(work)]
            Launch(hosts, launcher, arguments, repo=options.repo, per_host=per_host).wait()
            found = weights[launcher, count, per_host] = read_weights(work)
            if count > 1:
                one = weights["torchrun", 1, count * per_host]
                apart = max(float((one[name] - found[name]).abs().max()) for name in one)
                print(f"| {launcher} | {count} | {per_host} | {apart:.1g} |", flush=True)
            else:
                print(f"| {launcher} | {count} | {per_host} | (compared with) |", flush=True)


def read_weights(work: Path) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from engine.checkpoints.reading import read_weights as read
    from engine.modeling.weights import whole

    tensors, _ = read(work)
    return {name: whole(value).clone() for name, value in tensors.items()}


# -------------------------------------------------------------------- delay


def delay(options: argparse.Namespace) -> None:
    """Change the delay while a run goes on: times before and after it are those of the same processes."""
    delays = [0.0, *(value / 1000 for value in options.delays)]
    names = ["0 ms", *(f"{value:g} ms" for value in options.delays)]
    trips: dict[float, float] = {}
    print(f"Seconds per step, medians of {options.steps}; two hosts with one rank each, delays one way.")
    print(f"| ZeRO | K | one host | {' | '.join(names)} | round trips per step | one-way hops |")
    print("|" + "---|" * (len(names) + 5))
    for stage in options.stages:
        for accumulation in options.accumulation:
            given = settings(steps=1_000_000, accumulation=accumulation, stage=stage)
            with NetworkHosts(2, delay=0.0) as hosts:
                for value in delays:
                    if value not in trips:
                        hosts.delay(value)
                        trips[value] = hosts.round_trip()
                hosts.delay(0.0)
                with folder_of(given) as (config, work):
                    arguments = ["--config", str(config), "--work-dir", str(work)]
                    run = Launch(hosts, "torchrun", arguments, repo=options.repo, places=[0], per_host=2)
                    one_host = median_step(run, work, options.steps)
                    run.kill()
                with folder_of(given) as (config, work):
                    arguments = ["--config", str(config), "--work-dir", str(work)]
                    run = Launch(hosts, "torchrun", arguments, repo=options.repo)
                    found = []
                    for value in delays:
                        hosts.delay(value)
                        found.append(median_step(run, work, options.steps))
                    run.kill()
            slope = statistics.linear_regression([trips[value] for value in delays], found).slope
            times = " | ".join(f"{value:.3f}" for value in [one_host, *found])
            print(f"| {stage} | {accumulation} | {times} | {slope:.1f} | {2 * slope:.0f} |", flush=True)
    print("Measured round trips, ms: " + ", ".join(f"{trips[value] * 1000:.2f}" for value in delays))


def median_step(run: Launch, work: Path, steps: int) -> float:
    """Of the next steps but two: those may have begun before the delay was changed."""
    run.wait_for_step(work, 5)
    first = last_step(work) + 2
    run.wait_for_step(work, first + steps)
    return statistics.median(float(record["seconds"]) for record in records(work) if record["step"] > first)


# -------------------------------------------------------------------- messages

# Wraps torch's collectives and the wait for them, notes who called and how long it took, then runs the training script.
COUNTING = """
import collections, json, os, runpy, sys, time
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

calls, seconds, inside = collections.Counter(), collections.Counter(), [False]

def caller():
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/deepspeed/comm/" not in name and "/deepspeed/utils/" not in name \\
                and name not in (__file__, "<string>") and "contextlib" not in name and "logging" not in name:
            short = "deepspeed" + name.rsplit("/deepspeed", 1)[1] if "/deepspeed/" in name else \\
                "/".join(name.split("/")[-3:])
            return f"{short}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"

def counted(name, function):
    def call(*args, **kwargs):
        if inside[0]:
            return function(*args, **kwargs)
        key, inside[0], began = f"{name} {caller()}", True, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            inside[0] = False
            calls[key] += 1
            seconds[key] += time.perf_counter() - began
    return call

for name in ("all_reduce reduce broadcast all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor "
             "gather all_to_all all_to_all_single barrier gather_object all_gather_object broadcast_object_list "
             "all_gather_into_tensor_coalesced all_gather_coalesced send recv isend irecv batch_isend_irecv "
             "monitored_barrier").split():
    if hasattr(c10d, name):
        replacement = counted(name, getattr(c10d, name))
        setattr(c10d, name, replacement)
        setattr(dist, name, replacement)
c10d.Work.wait = counted("wait", c10d.Work.wait)

def left(code, leave=os._exit):
    write()
    leave(code)

def write():
    with open(f"{os.environ['COUNTS']}.{os.environ['RANK']}", "w") as file:
        json.dump({"calls": calls, "seconds": seconds}, file)

os._exit = left
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.dirname(sys.argv[0])))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    write()
"""


def messages(options: argparse.Namespace) -> None:
    """A short and a longer run: the difference is what their steps did, without the start and the end."""
    short, long = 4, 4 + options.steps
    counts: list[dict[str, Any]] = []
    seconds = options.delay / 1000
    with NetworkHosts(2, delay=seconds) as hosts:
        trip = hosts.round_trip()
        script = hosts.folder / "counting.py"
        script.write_text(COUNTING)
        for steps in (short, long):
            given = settings(steps=steps, accumulation=options.accumulation, stage=options.stage)
            with folder_of(given) as (config, work):
                arguments = [
                    str(options.repo / "launch" / "train.py"),
                    "--config",
                    str(config),
                    "--work-dir",
                    str(work),
                ]
                place = hosts.folder / f"counts{steps}"
                variables = {"COUNTS": str(place)}
                run = Launch(hosts, "torchrun", arguments, repo=options.repo, script=script, variables=variables)
                run.wait()
                counts.append(json.loads(Path(f"{place}.0").read_text()))
    print(
        f"ZeRO-{options.stage}, K = {options.accumulation}, rank 0 of 2, per optimizer step; a round trip takes",
        end=" ",
    )
    print(f"{trip * 1000:.1f} ms")
    print("| collective | called by | calls | round trips waited for |")
    print("|---|---|---|---|")
    total = 0.0
    for key in sorted(counts[1]["calls"], key=lambda key: -counts[1]["seconds"][key]):
        calls, waited = (
            (counts[1][kind][key] - counts[0][kind].get(key, 0)) / (long - short) for kind in ("calls", "seconds")
        )
        if calls:
            name, caller = key.split(" ", 1)
            total += waited / trip
            print(f"| {name} | {caller} | {calls:g} | {waited / trip:.2f} |")
    print(f"| all | | | {total:.2f} |")


# -------------------------------------------------------------------- cut


def cut(options: argparse.Namespace) -> None:
    """Silently lose all frames of one host while a run trains; everything must end, and resume when they come back."""
    failed = False
    print("| launcher | hosts | cut off | last rank ended after, s: on it | elsewhere | launchers | said |")
    print("|---|---|---|---|---|---|---|")
    for count in options.hosts:
        for victim in [count - 1, 0] if options.victim is None else [options.victim - 1]:
            row, good = cut_case(options, count, victim)
            print(row, flush=True)
            failed |= not good
    if failed:
        raise SystemExit("error: a case failed")


def cut_case(options: argparse.Namespace, count: int, victim: int) -> tuple[str, bool]:
    given = settings(steps=1_000_000, batch=count, ranks=count)
    given["run"]["checkpoint_interval"] = 1  # 16 images
    ssh = options.launcher == "deepspeed"
    with folder_of(given) as (config, work), NetworkHosts(count, ssh=ssh) as hosts:
        arguments = ["--config", str(config), "--work-dir", str(work), "--resume"]
        run = Launch(hosts, options.launcher, arguments, repo=options.repo)
        run.wait_for_step(work, 2 * 16 // count + 3)
        hosts.cut(victim)
        began = time.monotonic()
        ended: dict[int, float] = {}
        while len(ended) < count and time.monotonic() - began < LIMIT + 30:
            for place in range(count):
                if place not in ended and not any(is_rank(pid) for pid in run.running(place)):
                    ended[place] = time.monotonic() - began
            time.sleep(0.1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(process.poll() is None for process in run.processes):
            time.sleep(0.1)
        launchers = time.monotonic() - began if time.monotonic() < deadline else None
        text = run.log.read_text()
        sentences = sorted(set(re.findall(r"error: (?:rank \d+ on|none of).*?last checkpoint", text)))
        reached = last_step(work)
        hosts.restore(victim)
        run.kill()
        again = Launch(hosts, options.launcher, arguments, repo=options.repo, log=hosts.folder / "again")
        again.wait_for_step(work, reached + 3)
        again.kill()
        on_it, elsewhere = ended.get(victim), [ended.get(place) for place in range(count) if place != victim]
        last = None if None in elsewhere else max(value for value in elsewhere if value is not None)
        times = ["never" if value is None else f"{value:.1f}" for value in (on_it, last, launchers)]
        good = on_it is not None and last is not None and max(on_it, last) < LIMIT and bool(sentences)
        if options.verbose or not good:
            print(text)
        name = hosts.names[victim]
        row = f"| {options.launcher} | {count} | {name} | {' | '.join(times)} | {'<br>'.join(sentences)} |"
        return row, good


def is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


# -------------------------------------------------------------------- check, remove


def check(options: argparse.Namespace) -> None:
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    missing = ssh_missing()
    print(f"hosts can be made{'; without deepspeed, not installed: ' if missing else ''}{', '.join(missing)}")


def remove(options: argparse.Namespace) -> None:
    print("\n".join(remove_leftovers()) or "nothing was left")


# -------------------------------------------------------------------- arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Any, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(function.__name__, help=text, description=text)
        found.set_defaults(function=function)
        found.add_argument("--repo", type=Path, default=ROOT, help="the checkout to run; default: this one")
        return found

    one = command(train, "run launch/train.py on hosts; its arguments follow --")
    one.add_argument("--hosts", type=int, default=2)
    one.add_argument("--ranks", type=int, default=1, help="ranks per host")
    one.add_argument("--launcher", choices=["torchrun", "deepspeed"], default="torchrun")
    one.add_argument("--delay", type=float, help="seconds, one way")
    one.add_argument("--loss", type=float, default=0.0, help="the part of the frames that is lost, such as 0.01")
    one.add_argument("--debian", action="store_true", help="a host's own name means 127.0.1.1 on it")
    one.add_argument("--limit", type=float, default=300, help="seconds after which everything is killed")
    one.add_argument("arguments", nargs=argparse.REMAINDER, help="-- arguments of launch/train.py, with absolute paths")

    two = command(same, "the same weights on one, two and four hosts")
    two.add_argument("--stage", type=int, default=2)

    three = command(delay, "seconds per step against the delay of the network")
    three.add_argument("--delays", type=float, nargs="+", default=[0.5, 5, 20], help="ms, one way")
    three.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    three.add_argument("--accumulation", type=int, nargs="+", default=[1])
    three.add_argument("--steps", type=int, default=15, help="steps per delay")

    four = command(messages, "the collectives of a step, by caller")
    four.add_argument("--delay", type=float, default=20, help="ms, one way")
    four.add_argument("--stage", type=int, default=2)
    four.add_argument("--accumulation", type=int, default=1)
    four.add_argument("--steps", type=int, default=10)

    five = command(cut, "lose a host for good during a step, and resume")
    five.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    five.add_argument("--victim", type=int, help="the number of the host to lose; default: the last, then the first")
    five.add_argument("--launcher", choices=["torchrun", "deepspeed"], default="torchrun")
    five.add_argument("--verbose", action="store_true", help="show what the run printed")

    command(check, "whether hosts can be made here")
    command(remove, "remove hosts that a killed process left")

    options = parser.parse_args()
    if options.command == "train" and options.arguments[:1] == ["--"]:
        del options.arguments[0]
    options.function(options)


if __name__ == "__main__":
    main()
