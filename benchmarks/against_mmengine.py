"""Images per second on two CPU ranks, against mmengine's own DeepSpeedStrategy.

RetinaNet-R18 at 256x192, four images a rank, ZeRO-2, SGD, the same COCO-style data, transforms and loader processes.
The two take turns, process by process. Seconds of a step are medians without the first ones. There is a ratio for each
pair of turns, so that a load that comes and goes hits both.

mmengine's strategy does not start on DeepSpeed 0.19 (it imports a module that is gone), nor without a GPU (it chooses a
CUDA device). So it runs on 0.17.6, from a folder of its own, with that call left out:

    pip install --no-deps --target /tmp/deepspeed-0.17.6 deepspeed==0.17.6
    python benchmarks/against_mmengine.py --data bccd --theirs /tmp/deepspeed-0.17.6 --turns 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = "mmdet::retinanet/retinanet_r18_fpn_1x_coco.py"
FIRST = 6  # steps in which libraries are loaded and kernels are chosen
SIZE, MICRO, RANKS, WORKERS = (256, 192), 4, 2, 1
SGD: dict[str, Any] = dict(lr=0.001, momentum=0.9, weight_decay=1e-4)


def theirs(data: Path, steps: int, out: Path) -> None:
    """One rank of mmengine's runner; rank 0 writes the seconds of its steps."""
    import torch

    torch.cuda.set_device = lambda *_: None  # there is no GPU
    from mmengine._strategy import DeepSpeedStrategy  # noqa: F401
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.hub import get_config
    from mmengine.runner import FlexibleRunner

    import models  # noqa: F401  (mmcv's ops without a compiler, as in our own run)

    seconds: list[float] = []

    class Clock(Hook):
        before = time.monotonic()

        def after_train_iter(self, *_: Any, **__: Any) -> None:
            now = time.monotonic()
            seconds.append(now - self.before)
            self.before = now

    config = get_config(MODEL)
    config.model.backbone.init_cfg = None
    config.model.bbox_head.num_classes = 3
    pipeline = [
        dict(type="LoadImageFromFile", backend_args=None),
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="Resize", scale=SIZE, keep_ratio=True),
        dict(type="RandomFlip", prob=0.5),
        dict(type="PackDetInputs"),
    ]
    dataset = dict(
        type="CocoDataset",
        metainfo=dict(classes=tuple(c["name"] for c in json.loads((data / "train.json").read_text())["categories"])),
        data_root=str(data),
        ann_file="train.json",
        data_prefix=dict(img="images/"),
        pipeline=pipeline,
    )
    runner = FlexibleRunner(
        model=config.model,
        work_dir=tempfile.mkdtemp(prefix="mmengine-"),
        strategy=dict(
            type="DeepSpeedStrategy",
            zero_optimization=dict(stage=2),
            train_micro_batch_size_per_gpu=MICRO,
        ),
        train_dataloader=dict(
            batch_size=MICRO,
            num_workers=WORKERS,
            persistent_workers=True,
            sampler=dict(type="InfiniteSampler", shuffle=True),
            dataset=dataset,
        ),
        optim_wrapper=dict(type="DeepSpeedOptimWrapper", optimizer=dict(type="SGD", **SGD)),
        train_cfg=dict(type="IterBasedTrainLoop", max_iters=steps),
        default_hooks=dict(checkpoint=None, logger=dict(type="LoggerHook", interval=1000)),
        custom_hooks=[Clock()],
        default_scope="mmdet",
        env_cfg=dict(dist_cfg=dict(backend="gloo")),
        launcher="pytorch",
        log_level="ERROR",
        cfg=Config(dict()),
    )
    runner.train()
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(seconds))


def our_config(data: Path, steps: int, folder: Path) -> dict[str, Any]:
    split = {"annotations": "train.json", "images": "images"}
    return {
        "train_batch_size": MICRO * RANKS,
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": 2},
        "detector": {"config": MODEL},
        "data": {"root": str(data), "train": split, "val": split, "scale": list(SIZE), "workers": WORKERS},
        "optimizer": {"type": "SGD", "params": SGD},
        "schedule": {"steps": steps, "warmup_steps": 1},
        "run": {"work_dir": str(folder / "run"), "eval_interval": 0, "checkpoint_interval": 0},
    }


def turn(kind: str, data: Path, steps: int, rival: Path) -> float:
    """Median seconds of a step of one run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "ours":
            (folder / "config.json").write_text(json.dumps(our_config(data, steps, folder)))
            environment["PYTHONPATH"] = str(ROOT)
            command = [*start, str(ROOT / "launch/train.py"), "--deepspeed_config", str(folder / "config.json")]
        else:
            environment["PYTHONPATH"] = f"{rival}:{ROOT}"
            command = [*start, __file__, "--data", str(data), "--steps", str(steps), "--out", str(folder / "seconds")]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{kind}: {' '.join(command)}\n{done.stderr[-3000:]}")
        if kind == "ours":
            lines = (folder / "run/metrics.jsonl").read_text().splitlines()
            seconds = [json.loads(line)["seconds"] for line in lines]
        else:
            seconds = json.loads((folder / "seconds").read_text())
    return statistics.median(seconds[FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.json and images/")
    parser.add_argument("--theirs", type=Path, help="folder with deepspeed 0.17.6")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # set for a rank of theirs
    given = parser.parse_args()
    if given.out is not None:
        return theirs(given.data, given.steps, given.out)
    ratios, images = [], MICRO * RANKS
    for number in range(given.turns):
        kinds = ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours")
        seconds = {kind: turn(kind, given.data.resolve(), given.steps, given.theirs) for kind in kinds}
        ratios.append(seconds["theirs"] / seconds["ours"])
        print(
            f"turn {number + 1}: ours {images / seconds['ours']:.2f} images/s, "
            f"theirs {images / seconds['theirs']:.2f}, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"ratio: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
