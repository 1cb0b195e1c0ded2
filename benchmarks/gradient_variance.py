"""Does the misalignment of the paper's first figure show on two cores, and does AGVM remove it?

Trains two small pipelines from scratch on drawn shapes, at a small batch and at one 16 times larger (by accumulation,
so that batch norm sees the same four images), with and without modulation, with two seeds each. Then it plots the runs
of every pipeline at matched optimizer steps and at matched epochs. The learning rate is constant after the warm-up, so
that the first steps of a long run equal those of a short one. It grows by sqrt(1.5) per doubling of the batch. Finished
runs are kept and not run again.

  python benchmarks/gradient_variance.py --out work_dirs/variance
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Pipeline -> detector. For 64-pixel images a smaller Faster R-CNN is enough.
PIPELINES = {"retinanet": "tiny_retinanet", "faster_rcnn": "micro_faster_rcnn"}
IMAGES, MICRO = 640, 4
# batch, epochs, learning rate, warm-up steps
SMALL, LARGE = (8, 8, 1e-3, 50), (128, 16, 2.25e-3, 10)
MEASURE = ["optimizer.params.clip=[1, 1]"]
# 80 windows at batch 128 need a shorter memory than the paper's 0.97, which is for hundreds of windows.
MODULATE = ["optimizer.params.alpha=0.9"]


def runs() -> dict[str, tuple[str, list[str]]]:
    """Name of every run -> pipeline and settings."""
    found = {}
    for pipeline in PIPELINES:
        for seed in (0, 1):
            for name, (batch, epochs, lr, warmup), method in (
                ("batch-8", SMALL, MEASURE),
                ("batch-128", LARGE, MEASURE),
                ("batch-128-agvm", LARGE, MODULATE),
            ):
                found[f"{pipeline}/{name}-seed{seed}"] = (
                    pipeline,
                    [
                        f"detector.config={PIPELINES[pipeline]}",
                        f"train_batch_size={batch}",
                        f"train_micro_batch_size_per_gpu={MICRO}",
                        f"gradient_accumulation_steps={batch // MICRO}",
                        f"data.shapes.train_images={IMAGES}",
                        "data.shapes.image_size=64",
                        "data.scale=[64, 64]",
                        "data.workers=0",
                        "optimizer.type=AGVMAdamW",
                        f"optimizer.params.lr={lr}",
                        "optimizer.params.start_step=0",
                        f"optimizer.params.tau={1 if batch > 8 else 4}",
                        *method,
                        f"schedule.epochs={epochs}",
                        f"schedule.warmup_steps={warmup}",
                        "schedule.decay=constant",
                        f"run.seed={seed}",
                        "run.eval_interval=0",
                        "run.checkpoint_interval=0",
                        "run.log_interval=20",
                    ],
                )
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("work_dirs/variance"), metavar="DIR")
    arguments.add_argument(
        "--at-once", type=int, default=2, metavar="N", help="runs side by side, a core each (default 2)"
    )
    options = arguments.parse_args()
    waiting = deque((name, *run) for name, run in runs().items() if not (options.out / name / "done").exists())
    running: dict[str, subprocess.Popen] = {}
    try:
        _train_all(options, waiting, running)
    finally:
        _stop(running.values())  # if a run fails, the others must not continue alone
    for pipeline in PIPELINES:
        folders = [str(options.out / name) for name in runs() if name.startswith(f"{pipeline}/")]
        print(f"\n{pipeline}", flush=True)
        subprocess.run(
            [
                sys.executable,
                ROOT / "launch/plot.py",
                *folders,
                "--matched",
                "step",
                "epoch",
                "--smooth",
                "0.8",
                "--out",
                str(options.out / f"{pipeline}.png"),
            ],
            check=True,
        )


def _train_all(options: argparse.Namespace, waiting: deque, running: dict[str, subprocess.Popen]) -> None:
    total, began = len(waiting), time.monotonic()
    while waiting or running:
        while waiting and len(running) < options.at_once:
            name, pipeline, settings = waiting.popleft()
            running[name] = _start(options.out / name, pipeline, settings)
        time.sleep(1)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            if process.returncode:
                sys.exit(f"{name} ended with {process.returncode}: see {options.out / name}.log")
            (options.out / name / "done").touch()
            done = total - len(waiting) - len(running)
            print(
                f"{done}/{total} {name}  ETA {(time.monotonic() - began) / done * (total - done) / 60:.0f} min",
                flush=True,
            )


def _stop(processes: Collection[subprocess.Popen]) -> None:
    """SIGTERM to all, then SIGKILL to those that do not end."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(folder: Path, pipeline: str, settings: list[str]) -> subprocess.Popen:
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped
    folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = [part for setting in settings for part in ("--set", setting)]
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen(
            [
                sys.executable,
                ROOT / "launch/train.py",
                "--deepspeed_config",
                ROOT / f"ds_configs/shapes_{pipeline}.json",
                *overrides,
                "--work-dir",
                str(folder),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


if __name__ == "__main__":
    main()
