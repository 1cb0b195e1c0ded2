"""Predicted against measured communication: every collective of a plain step and of an AGVM window, on two real ranks.

Trains each detector for four steps at each ZeRO stage, with AGVM windows in the second and the fourth, and notes every
collective of the third and the fourth as torch starts it. The prediction knows the model's parameters, the settings and
the number of ranks, and nothing of the run.

    python benchmarks/traffic_against_measured.py
    python benchmarks/traffic_against_measured.py --detectors uninet_b1_htcx --stages 3 --dtype bf16 --accumulation 2
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

RETINANET, FASTER_RCNN, HTCX = (
    "mmdet::retinanet/retinanet_r18_fpn_1x_coco.py",
    "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "uninet_b1_htcx",
)


def content(detector: str, stage: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * options.accumulation,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        **({} if options.dtype == "fp32" else {options.dtype: {"enabled": True}}),
        "detector": {"config": detector},
        "data": {
            "task": "instance" if "htcx" in detector else "detection",
            "dataset": "shapes",
            "workers": 0,
            "shapes": {"train_images": 16, "val_images": 2, "image_size": options.size},
            "scale": [options.size, options.size],
        },
        "optimizer": {"type": "AGVMAdamW", "params": {"lr": 1e-5, "tau": 2, "start_step": 0}},
        "schedule": {"steps": 4, "warmup_steps": 0, "decay": "constant"},
        "run": {"eval_interval": 0, "checkpoint_interval": 0},
    }


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    # Here and not above, because the imports take seconds and `--help` needs none of them.
    from engine.planning.comparison import measured_and_predicted
    from engine.zero.processes import init_distributed

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    init_distributed(init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 0:
        print(
            f"{'detector':<50}{'ZeRO':>5} {'step':<7}{'measured':>14}{'predicted':>14}  calls measured / predicted",
            flush=True,
        )
    for detector in options.detectors:
        for stage in options.stages:
            steps = measured_and_predicted(content(detector, stage, options))
            for step in steps[2:] if rank == 0 else ():
                measured, predicted = step.payload()
                print(
                    f"{detector:<50}{stage:>5} {'window' if step.window else 'plain':<7}{measured:>14}{predicted:>14}  "
                    f"{sum(step.measured.values())} / {sum(step.predicted.values())}"
                    f"{'' if measured == predicted else '  DIFFERENT'}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--detectors", nargs="+", default=[RETINANET, FASTER_RCNN, HTCX])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--size", type=int, default=96, help="longer side of the images in pixels")
    options = parser.parse_args()
    mp.spawn(rank_main, args=(str(Path(tempfile.mkdtemp()) / "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
