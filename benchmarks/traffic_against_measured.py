"""Predicted against measured communication: every collective of a plain step and of an AGVM window, on two real ranks.

Trains each detector for four steps at each ZeRO stage, with AGVM windows in the second and the fourth, and notes every
collective of the third and the fourth as torch starts it. The prediction knows the model's parameters, the settings and
the number of ranks, and nothing of the run.

    python benchmarks/traffic_against_measured.py
    python benchmarks/traffic_against_measured.py --detectors uninet_b1_htcx --stages 3 --dtype bf16 --accumulation 2
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

RETINANET, FASTER_RCNN, HTCX = (
    "mmdet::retinanet/retinanet_r18_fpn_1x_coco.py",
    "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py",
    "uninet_b1_htcx",
)


@dataclass(frozen=True)
class Step:
    """Calls of each (operation, payload bytes) in one optimizer step."""

    measured: Counter[tuple[str, int]]
    predicted: Counter[tuple[str, int]]
    window: bool

    def payload(self) -> tuple[int, int]:
        return tuple(sum(size * calls for (_, size), calls in kind.items()) for kind in (self.measured, self.predicted))


def measured_and_predicted(content: dict[str, Any], follow_order: bool = False) -> list[Step]:
    """Train on this rank's process group and compare step by step.

    `follow_order` gives the prediction the order in which gradients came and modules ran, which decides where buckets are
    cut but not how much is sent.
    """
    from engine import distributed
    from engine.optim.registry import sums_per_layer
    from engine.planning.gathers import model_uses
    from engine.planning.norms import synced_norms
    from engine.planning.settings import window_settings
    from engine.planning.shards import parameters_of
    from engine.planning.traffic import step_calls, step_traffic
    from engine.recipes.load import parse_config
    from engine.train import loop as training
    from engine.zero.processes import import_deepspeed
    from engine.zero.recording import CollectiveRecorder, OrderRecorder, count_calls
    from engine.zero.settings import communication_settings

    deepspeed = import_deepspeed()
    recorder, seen, kept = CollectiveRecorder(), [], {}
    initialize, build, note = deepspeed.initialize, training.build_run, training.step_record

    def look_at_model(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"]
        kept.update(
            parameters=parameters_of(model, kwargs["optimizer"].param_groups),
            uses=model_uses(model),
            norms=synced_norms(model),
        )
        return initialize(*args, **kwargs)

    def look_at_run(*args: Any) -> Any:
        kept["run"] = build(*args)
        kept["order"] = OrderRecorder(kept["run"].engine)
        recorder.take()
        return kept["run"]

    def look_at_step(run: Any, *args: Any, **kwargs: Any) -> Any:
        record = note(run, *args, **kwargs)
        seen.append((count_calls(recorder.take()), *kept["order"].take()))
        return record

    finish = training.finish_report
    folder = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    config = parse_config({**content, "run": {**content.get("run", {}), "work_dir": folder}})
    deepspeed.initialize, training.build_run, training.step_record = look_at_model, look_at_run, look_at_step
    training.finish_report = lambda work_dir: None
    try:
        with recorder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            training.train(config)
    finally:
        deepspeed.initialize, training.build_run, training.step_record = initialize, build, note
        training.finish_report = finish
        if "run" in kept:
            kept["run"].engine.destroy()
    run, parameters = kept["run"], kept["parameters"]
    K, trained = run.plan.accumulation, sum(p.trained for p in kept["parameters"])
    settings = communication_settings(run.config.deepspeed, run.plan.world, K)
    modulator = getattr(run.optimizer, "modulator", None)
    steps, first = [], True
    for number, (calls, order, uses) in enumerate(seen, start=1):
        collectives = step_traffic(
            parameters,
            settings,
            window=window_settings(run.config.optimizer.type, run.config.optimizer.params),
            order=order[-trained:] if follow_order else None,
            uses=uses[len(uses) // K * (K - 1) :] if follow_order else kept["uses"],
            norms=kept["norms"],
            losses=len(run.loss_names),
            layer_numbers=sums_per_layer(run.config.optimizer.type),
            backend="gloo",
        )
        window = modulator is not None and modulator.is_window(number)
        steps.append(Step(calls, step_calls(collectives, K, window=window, first=window and first), window))
        first = first and not window
    return steps


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
    import os

    import torch

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
    import torch.multiprocessing as mp

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--detectors", nargs="+", default=[RETINANET, FASTER_RCNN, HTCX])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--size", type=int, default=96, help="longer side of the images in pixels")
    options = parser.parse_args()
    mp.spawn(rank_main, args=(tempfile.mktemp(), options), nprocs=2)


if __name__ == "__main__":
    main()
