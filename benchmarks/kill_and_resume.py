"""Kill a run with SIGKILL many times, also while it saves, and check that it ends like a run that was never killed.

  python benchmarks/kill_and_resume.py --kills 40 --stage 2

A tiny detector trains on two ranks and saves every other step. One rank or both are killed at a random moment; half of
the kills wait until a checkpoint is being written. Each new start must find an undamaged checkpoint. At the end,
weights and records must equal those of an undisturbed run, bit for bit. Ranks are forked from a process that has
imported everything, so that a start takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

WORLD = 2


def settings(work_dir: Path, stage: int, steps: int) -> dict:
    narrow = {"backbone.base_channels": 8, "neck.in_channels": [8, 16, 32, 64]}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "detector": {"config": "tiny_retinanet", "options": narrow},
        "data": {
            "dataset": "shapes",
            "shapes": {"train_images": 12, "val_images": 4, "image_size": 64},
            "scale": [64, 64],
            "workers": 0,
        },
        "schedule": {"steps": steps, "warmup_steps": 5, "decay": "cosine"},
        "optimizer": {"type": "AGVMAdamW", "params": {"lr": 1e-3, "tau": 3, "alpha": 0.9, "start_step": 0}},
        "run": {"work_dir": str(work_dir), "eval_interval": 0, "checkpoint_interval": 0.67, "ema": 0.99},
    }


def live(config: dict, rank: int, store: str, log: Path) -> None:
    """Train as one rank, from the newest checkpoint to the end, in a forked process."""
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD))
    from engine.recipes.load import parse_config
    from engine.train.loop import train
    from engine.train.work_dir import Resume
    from engine.zero.processes import init_distributed

    init_distributed(init_method=f"file://{store}", rank=rank, world_size=WORLD)
    train(parse_config(config), Resume())
    os._exit(0)


def start(config: dict, log: Path) -> list[int]:
    store = tempfile.mktemp(prefix="gigadet-store-")
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                live(config, rank, store, log)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def ended(pid: int) -> int | None:
    """The exit code of a child, or None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def wait(pids: list[int]) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise SystemExit(f"a rank ended with {codes}")


def steps_on_record(work_dir: Path) -> int:
    with contextlib.suppress(OSError):
        return (work_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def saving(work_dir: Path) -> bool:
    return any((work_dir / "checkpoints").glob(".saving-*"))


def end_life(pids: list[int], work_dir: Path, chance: random.Random) -> tuple[str, bool] | None:
    """Kill one rank or all at a random moment; None if the run ended before."""
    inside = chance.random() < 0.5
    first, deadline = steps_on_record(work_dir), time.monotonic() + chance.uniform(0.2, 12)
    while time.monotonic() < deadline + 20:
        codes = [ended(pid) for pid in pids[:1]]
        if codes[0] is not None:
            if codes[0]:
                raise SystemExit(f"rank 0 ended by itself with {codes[0]}")
            wait(pids[1:])
            return None
        if inside and saving(work_dir) and steps_on_record(work_dir) != first and chance.random() < 0.3:
            time.sleep(chance.uniform(0, 0.02))
            break
        if not inside and time.monotonic() > deadline:
            break
        time.sleep(0.002)
    hit_saving = saving(work_dir)
    victims = pids if chance.random() < 0.5 else [chance.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if len(victims) < len(pids):
        time.sleep(1)  # the others wait in a collective, until a launcher would end them
        for pid in pids:
            if pid not in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return ("all ranks" if len(victims) == len(pids) else f"rank {pids.index(victims[0])}"), hit_saving


def outcome(work_dir: Path) -> tuple[dict, list[dict]]:
    from engine.checkpoints.reading import read_weights
    from engine.modeling.weights import whole

    costs = ("images_per_second", "seconds", "data_seconds", "memory_gb")
    records = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
    tensors = {
        (name, ema): whole(value) for ema in (False, True) for name, value in read_weights(work_dir, ema=ema)[0].items()
    }
    return tensors, [{key: value for key, value in record.items() if key not in costs} for record in records]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=40)
    arguments.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    arguments.add_argument("--steps", type=int, default=400, help="length of the run; it must outlast the kills")
    arguments.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = arguments.parse_args()
    began = time.monotonic()
    from engine.zero.processes import import_deepspeed

    import_deepspeed()
    import engine.train.loop  # noqa: F401
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="gigadet-soak-"))
    config = settings(folder / "killed", options.stage, options.steps)
    kills = inside = 0
    while kills < options.kills:
        pids = start(config, folder / "killed.log")
        life = end_life(pids, folder / "killed", chance)
        if life is None:
            raise SystemExit(f"the run ended after {kills} kills: give more --steps")
        kills, inside = kills + 1, inside + life[1]
        print(
            f"kill {kills:3} of {life[0]:9} at step {steps_on_record(folder / 'killed'):4}"
            f"{' inside saving' if life[1] else ''}",
            flush=True,
        )
    wait(start(config, folder / "killed.log"))
    wait(start(settings(folder / "whole", options.stage, options.steps), folder / "whole.log"))
    log = (folder / "killed.log").read_text()
    resumed = [int(step) for step in re.findall(r"^resume  .*step-(\d+) ", log, re.MULTILINE)]
    (killed, first), (whole, second) = outcome(folder / "killed"), outcome(folder / "whole")
    same = killed.keys() == whole.keys() and all(killed[name].equal(whole[name]) for name in whole)
    print(
        f"{kills} kills, {inside} inside saving; {len(resumed)} starts resumed a checkpoint, "
        f"{log.count('yet: starting')} began at step 0, {log.count('skipped:')} found a damaged one; "
        f"{options.steps} steps, ZeRO-{options.stage}; weights and averages equal: {same}, "
        f"records equal: {first == second}; {time.monotonic() - began:.0f} s"
    )
    if not (same and first == second and resumed == sorted(resumed)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
