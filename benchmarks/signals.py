"""Send signals to launchers and ranks of real runs: what is saved, which codes, how many seconds, and who stays behind.

  python benchmarks/signals.py                                      # all cases, about 25 minutes on two cores
  python benchmarks/signals.py --launchers deepspeed --signals SIGTERM --targets launcher

A tiny detector trains (on two ranks, but for plain `python`) and saves every 30 steps. After its first checkpoint the
signal is sent: to the launcher that was called, to DeepSpeed's launch.py, to rank 1, to all ranks, or to all processes,
as Ctrl-C and a scheduler do. A row is printed for every case, in Markdown. This process adopts orphans, so it sees
their exit codes. A case fails if the checkpoint is damaged, if a step was lost that could be saved, if a process stays
behind, or if the ranks took more than 10 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TRAIN = ROOT / "launch" / "train.py"
LIMIT, EVERY = 10.0, 30
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux


def settings() -> dict:
    narrow = {"backbone.base_channels": 8, "neck.in_channels": [8, 16, 32, 64]}
    shapes = {"train_images": 12, "val_images": 4, "image_size": 64}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "detector": {"config": "tiny_retinanet", "options": narrow},
        "data": {"dataset": "shapes", "shapes": shapes, "scale": [64, 64], "workers": 1},
        "schedule": {"steps": 100_000},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "run": {"eval_interval": 0, "checkpoint_interval": EVERY / 3, "log_interval": 10},
    }


def command(launcher: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    beside = Path(sys.executable).parent
    return {
        "deepspeed": [str(beside / "deepspeed"), "--num_accelerators", "2", "--master_port", port],
        "torchrun": [str(beside / "torchrun"), "--nproc-per-node", "2", "--master-port", port],
        "python": [],
    }[launcher]


class Case:
    def __init__(self, launcher: str, folder: Path) -> None:
        self.work = folder / "work"
        self.log = folder / "log"
        (folder / "run.json").write_text(json.dumps(settings()))
        with open(self.log, "w") as log:
            self.started = subprocess.Popen(
                [sys.executable, *command(launcher), str(TRAIN), "--config", str(folder / "run.json")]
                + ["--work-dir", str(self.work)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # As a terminal does; a script that was started with `&` ignores SIGINT, and so would this process.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                start_new_session=True,
            )
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}

    def alive(self) -> list[psutil.Process]:
        """The processes of this run: all are started with its work dir."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.work) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + 300
        while not (self.work / "checkpoints" / "latest").exists():
            if time.monotonic() > deadline or not self.alive():
                raise SystemExit(f"the run did not begin:\n{self.log.read_text()}")
            time.sleep(0.2)
        time.sleep(1)

    def chain(self) -> tuple[list[int], list[int]]:
        """The launchers from the outermost on, and the ranks in order, each of which has a loader process below it."""
        ranks = {process.ppid() for process in self.alive() if not process.children()}
        launchers = []
        above = psutil.Process(min(ranks)).parent()
        while above is not None and above.pid != os.getpid():
            launchers.insert(0, above.pid)
            above = above.parent()
        return launchers, sorted(ranks, key=rank_of)

    def wait_for_the_end(self, pids: list[int], began: float) -> list[psutil.Process]:
        """Note when each process ends, and with which code. Returns those that stay."""
        while time.monotonic() - began < 60 and (self.alive() or len(self.ended) < len(pids)):
            with contextlib.suppress(ChildProcessError):  # loaders too: launchers wait for them
                while (done := os.waitpid(-1, os.WNOHANG))[0]:
                    self.codes[done[0]] = os.waitstatus_to_exitcode(done[1])
            for pid in pids:
                if pid not in self.ended and not runs(pid):
                    self.ended[pid] = time.monotonic() - began
            time.sleep(0.05)
        return self.alive()


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def rank_of(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).environ().get("RANK", "0"))
    return 0


def as_shown(code: int | None) -> str:
    """As a shell shows it."""
    return "?" if code is None else str(128 - code if code < 0 else code)


def run_case(launcher: str, name: str, target: str) -> tuple[str, bool] | None:
    with tempfile.TemporaryDirectory(prefix="gigadet-signals-") as folder:
        case = Case(launcher, Path(folder))
        pids: list[int] = []
        try:
            case.wait_for_checkpoint()
            launchers, ranks = case.chain()
            everyone = [process.pid for process in case.alive()]
            victims = {
                "launcher": launchers[:1],
                "launch.py": launchers[1:2],
                "rank 1": ranks[1:2] or ranks,
                "all ranks": ranks,
                "all processes": everyone,
            }[target]
            if not victims:
                return None
            pids = launchers + ranks
            number, began = signal.Signals[name], time.monotonic()
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            left = case.wait_for_the_end(pids, began)
            return row(case, launcher, name, target, launchers, ranks, victims, left)
        finally:
            for process in case.alive():
                process.kill()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, 0):
                    pass


def row(
    case: Case,
    launcher: str,
    name: str,
    target: str,
    launchers: list[int],
    ranks: list[int],
    victims: list[int],
    left: list[psutil.Process],
) -> tuple[str, bool]:
    from engine.checkpoints.finding import find_checkpoint

    steps = len((case.work / "metrics.jsonl").read_text().splitlines())
    saved = find_checkpoint(case.work).step
    output = case.log.read_text()
    told = re.findall(r"return code = (-?\d+)|exitcode\s*: (-?\d+)", output)  # launchers tell a rank's code
    codes = [as_shown(case.codes[pid]) for pid in ranks if pid in case.codes]
    codes = codes or [as_shown(int(first or second)) for first, second in told]
    seconds = max((case.ended.get(pid, 60.0) for pid in ranks if pid not in victims or name != "SIGKILL"), default=0.0)
    shown = [case.codes.get(pid) for pid in launchers]
    sentences = [line for line in output.splitlines() if line.startswith(("error:", "stopped "))]
    complete = name == "SIGKILL" and target not in ("launcher", "launch.py") or saved == steps
    good = complete and not left and seconds <= LIMIT and len(sentences) <= 1 and (saved != steps or bool(sentences))
    cells = [
        launcher,
        name,
        target,
        f"step {saved} of {steps}",
        ", ".join(dict.fromkeys(codes)) or "?",
        as_shown(shown[0]) if launchers else "",
        f"{seconds:.1f}",
        f"{max(case.ended.get(pid, 60.0) for pid in launchers):.1f}" if launchers else "",
        str(len(left)),
        "; ".join(sentences).replace(str(case.work), "WORK") or "none",
    ]
    if not good:
        print(output[-4000:], file=sys.stderr)
    return f"| {' | '.join(cells)} |", good


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--launchers", nargs="+", default=["deepspeed", "torchrun", "python"])
    arguments.add_argument("--signals", nargs="+", default=["SIGTERM", "SIGINT", "SIGKILL"])
    arguments.add_argument(
        "--targets", nargs="+", default=["launcher", "launch.py", "rank 1", "all ranks", "all processes"]
    )
    options = arguments.parse_args()
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    columns = (
        "launcher | signal | to | saved | ranks' code | launcher's code | seconds: ranks | launcher | left | words"
    )
    print(f"| {columns} |\n|{'---|' * 10}", flush=True)
    bad = 0
    for launcher in options.launchers:
        for name in options.signals:
            for target in options.targets:
                if launcher == "python" and target != "all ranks" or launcher != "deepspeed" and target == "launch.py":
                    continue
                if name == "SIGKILL" and target == "all processes":  # nobody is left to do anything
                    continue
                result = run_case(launcher, name, target)
                if result is not None:
                    print(result[0] + ("" if result[1] else " FAILED"), flush=True)
                    bad += not result[1]
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
