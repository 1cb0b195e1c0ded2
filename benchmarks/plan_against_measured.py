"""The planner's peak of live tensor bytes beside that of real steps: two gloo ranks, several detectors, ZeRO 0, 2, 3.

Every case trains real steps with the run that `engine.train.build.build_run` builds, on random images of one size.
From the third step on a dispatch mode follows every storage from the operator that makes it to its end (`LiveBytes`
in engine/planning/step_trace.py), beginning with all tensors that the garbage collector knows. Measured is the
highest sum, on the rank that has more. It does not include what kernels allocate inside themselves; the resident
memory beside it includes everything (the interpreter and libraries too). Images have as many objects as samplers want
positives, so that real samplers take the numbers that the planner takes from the config.

    python benchmarks/plan_against_measured.py --detectors uninet_b1_htcx --stages 0 2 3 --size 256
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

POSITIVES = 8
DETECTORS = {
    "retinanet_r18": dict(config="mmdet::retinanet/retinanet_r18_fpn_1x_coco.py", task="detection", options={}),
    "faster_rcnn_r50": dict(
        config="mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
        task="detection",
        options={"train_cfg.rcnn.sampler.num": 32},
    ),
    "mask_rcnn_r50": dict(
        config="mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py",
        task="instance",
        options={"train_cfg.rcnn.sampler.num": 32},
    ),
    "uninet_b1_htcx": dict(
        config="uninet_b1_htcx",
        task="instance",
        options={f"train_cfg.rcnn.{stage}.sampler.num": 32 for stage in range(3)},
    ),
    "semantic_fpn_r18": dict(config="semantic_fpn_r18", task="semantic", options={}),
}


def settings(name: str, stage: int, args: argparse.Namespace) -> dict:
    """A run's JSON. Buckets are small beside the model, as they are in a real run."""
    detector = DETECTORS[name]
    return {
        "name": name,
        "train_batch_size": 2 * args.micro,
        "train_micro_batch_size_per_gpu": args.micro,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 2_000_000,
            "stage3_prefetch_bucket_size": 2_000_000,
        },
        "detector": {
            "config": detector["config"],
            "options": detector["options"],
            "checkpoint_activations": ["backbone"] if args.recompute else [],
        },
        "data": {
            "task": detector["task"],
            "dataset": "shapes",
            "workers": 0,
            "scale": [96, 96],
            "shapes": {"train_images": 4, "val_images": 2, "image_size": 96},
        },
        "optimizer": {"type": "AGVMAdamW", "params": {"lr": 1e-5, "tau": 3 if args.window else 1000}},
        "schedule": {"steps": 5, "warmup_steps": 0, "decay": "constant"},
        "run": {"eval_interval": 0, "checkpoint_interval": 0},
    }


def measure(rank: int, store: str, data: dict, args: argparse.Namespace, results) -> None:
    """Real steps on this rank; the peak of live bytes by phase, and the resident peak."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    from engine.zero.processes import init_distributed

    init_distributed(init_method=f"file://{store}", rank=rank, world_size=2)
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    from engine.planning.step_trace import LiveBytes
    from engine.recipes.load import parse_config
    from engine.train.build import build_run

    data["run"]["work_dir"] = tempfile.mkdtemp()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build_run(parse_config(data))
    samples = run.task.stand_ins(run.classes, micro=args.micro, height=args.size, width=args.size, objects=POSITIVES)
    images = [torch.randint(0, 255, (3, args.size, args.size), dtype=torch.uint8) for _ in range(args.micro)]
    phases: dict[str, int] = {}
    for step in range(4 if args.window else 3):
        watched = step >= 2
        live = LiveBytes()
        with live if watched else contextlib.nullcontext():
            if watched:
                live.follow_all()
            loss = run.engine({"inputs": images, "data_samples": samples})
            phases["forward"] = max(phases.get("forward", 0), live.restart_peak())
            run.engine.backward(loss)
            phases["backward"] = max(phases.get("backward", 0), live.restart_peak())
            run.forward.gradients.release()
            run.engine.step()
            phases["step"] = max(phases.get("step", 0), live.restart_peak())
            del loss
    results.put((rank, phases, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def predict(data: dict, args: argparse.Namespace, results) -> None:
    from engine.planning.image_sizes import Size
    from engine.planning.plan import Plan
    from engine.recipes.load import parse_config

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        plan = Plan(parse_config(data), world=2, fixed_size=Size(args.size, args.size), objects=POSITIVES)
        memory = plan.memory(window=args.window)
    results.put((memory.phases, memory.parts))


def run_processes(target, arguments: list[tuple]) -> list:
    """Forked, so that the imports are paid for once."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=target, args=(*values, results)) for values in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=3600) for _ in processes]
    for process in processes:
        process.join(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--detectors",
        nargs="+",
        default=["retinanet_r18", "faster_rcnn_r50", "uninet_b1_htcx"],
        choices=list(DETECTORS),
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 2, 3], choices=[0, 1, 2, 3])
    parser.add_argument("--size", type=int, default=256, help="side of the images, a multiple of 32")
    parser.add_argument("--micro", type=int, default=1, help="images of a micro-batch")
    parser.add_argument("--recompute", action="store_true", help="with activation checkpointing of the backbone")
    parser.add_argument("--window", action="store_true", help="with an AGVM window in the measured steps")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    from engine.zero.processes import import_deepspeed
    from models.mmdet_setup import import_mmdet

    import_deepspeed()
    import_mmdet()
    rows = []
    print(
        "detector          stage  predicted MB  measured MB   error   resident MB  where (predicted, measured)",
        flush=True,
    )
    for name in args.detectors:
        for stage in args.stages:
            data = settings(name, stage, args)
            ((phases, parts),) = run_processes(predict, [(data, args)])
            store = tempfile.mktemp()
            found = run_processes(measure, [(rank, store, json.loads(json.dumps(data)), args) for rank in range(2)])
            measured = max(found, key=lambda row: max(row[1].values()))
            guess, real = max(phases.values()), max(measured[1].values())
            row = dict(
                detector=name,
                stage=stage,
                predicted=guess,
                measured=real,
                error=guess / real - 1,
                resident=max(row[2] for row in found),
                phases=phases,
                measured_phases=measured[1],
                parts=parts,
            )
            rows.append(row)
            print(
                f"{name:17s} {stage:5d} {guess / 1e6:13.1f} {real / 1e6:12.1f} {row['error']:+7.1%} "
                f"{row['resident'] / 1e6:12.0f}  {max(phases, key=phases.get)}, "
                f"{max(measured[1], key=measured[1].get)}",
                flush=True,
            )
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
