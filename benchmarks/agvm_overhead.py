"""What an AGVM window costs, in seconds and bytes: both estimators, and the official scheme.

One run on two gloo ranks, Faster R-CNN R50, fixed images. Every block has one step of each variant in random order. The
extra time of a window is the difference to the plain step of the same block. CPU seconds are those of one rank; other
load on the machine disturbs them less than the clock. Bytes are counted from the collectives, as what a rank sends on
average in a ring (all-reduce: 2 (N-1)/N of the payload, others: (N-1)/N). "one all-reduce" is an all-reduce of the
whole model in fp32, in the same run, to compare with.

The official scheme has its own model and an unsharded optimizer, without DeepSpeed, and reduces tensor by tensor. Its
plain step ("tensorwise") is the full all-reduce. Its window is an all-reduce inside each half, a gather of the two
whole gradients, their cosine, then the full all-reduce. It is compared with its own plain step.

    python benchmarks/agvm_overhead.py --blocks 12 --size 256 --accumulation 1 4
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

BASELINE = {"halves": "plain", "replicas": "plain", "official": "tensorwise"}  # window: its own plain step
VARIANTS = ("plain", "tensorwise", *BASELINE, "all-reduce")
PAPER_SHARE = 0.0012  # AGVM's share of a step that the paper reports: 128 A100s, batch 1024
# The paper's fastest run: 768 A100s, 2 images each, 16 epochs of 77 steps in 4.2 minutes.
PAPER_STEP, PAPER_RANKS = 4.2 * 60 / (16 * 77), 768
# 97.5 % points of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def sent_bytes(calls: list) -> float:
    """The bytes that a rank sends in recorded collectives, on average. A half of two ranks is one rank, which sends
    nothing. What all ranks hand over in an all-to-all is divided by their number."""
    shares = {"all_reduce": 2.0, "all_to_all": 1 / dist.get_world_size()}
    return sum(shares.get(c.op, 1.0) * c.bytes * (c.ranks - 1) / c.ranks for c in calls)


def detector(depth: int = 50):
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.hub import get_config

    import models  # noqa: F401  (CPU kernels of mmcv's ops)

    register_all_modules()
    config = get_config("mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py").model
    config.backbone.init_cfg = None
    config.backbone.depth = depth
    if depth < 50:
        config.neck.in_channels = [64, 128, 256, 512]
    torch.manual_seed(0)
    return MODELS.build(config).train()


def build_engine(args: argparse.Namespace, accumulation: int):
    from engine.optim import AGVMSGD, AGVMAdamW, module_groups
    from engine.zero.engine import initialise_engine

    model = detector()
    rule = {"adamw": AGVMAdamW, "sgd": AGVMSGD}[args.rule]
    optimizer = rule(module_groups(model), lr=1e-5, tau=10)
    settings = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1 << 24},
    }
    engine = initialise_engine(model, optimizer, settings)
    optimizer.attach(engine, bucket_size=args.bucket_size)
    return engine, optimizer


def pictures(args: argparse.Namespace, j: int):
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    generator = torch.Generator().manual_seed(j)
    samples = []
    for _ in range(args.batch):
        corners = torch.rand(4, 2, generator=generator) * args.size * 0.5
        sample = DetDataSample(
            metainfo=dict(
                img_shape=(args.size, args.size),
                pad_shape=(args.size, args.size),
                batch_input_shape=(args.size, args.size),
                scale_factor=(1.0, 1.0),
            )
        )
        sample.gt_instances = InstanceData(
            bboxes=torch.cat([corners, corners + args.size * 0.3], 1), labels=torch.arange(4)
        )
        samples.append(sample)
    return torch.randn(args.batch, 3, args.size, args.size, generator=generator), samples


class Official:
    """The official scheme on two ranks: each half is one rank, every collective is of one tensor."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = detector()
        self.rule = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[args.rule](self.model.parameters(), lr=1e-5)
        self.half = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def step(self, data: list, loss_seed: int, window: bool) -> None:
        for images, samples in data:
            torch.manual_seed(loss_seed)
            loss = self.model.parse_losses(self.model(images, samples, mode="loss"))[0]
            (loss / len(data)).backward()
        for p in self.model.parameters():
            if p.grad is None:
                continue
            if window:
                half = p.grad.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(half, group=self.half)
                halves = [torch.empty_like(half) for _ in range(2)]
                dist.all_gather(halves, half)
                torch.nn.functional.cosine_similarity(halves[0].flatten(), halves[1].flatten(), dim=0).item()
            dist.all_reduce(p.grad)
            p.grad /= 2
        self.rule.step()
        self.rule.zero_grad()


class Bench:
    """All variants on the same data: an engine for ours, a plain model for the official scheme."""

    def __init__(self, args: argparse.Namespace, accumulation: int) -> None:
        self.engine, self.optimizer = build_engine(args, accumulation)
        self.official = Official(args)
        self.data = [pictures(args, k * 2 + dist.get_rank()) for k in range(accumulation)]
        self.whole = torch.zeros(sum(p.numel() for p in self.official.model.parameters()))

    def step(self, variant: str) -> tuple[float, float]:
        """Seconds of one step, by the clock and of this process."""
        self._set_window(variant)
        dist.barrier()
        start = time.perf_counter(), time.process_time()
        if variant == "all-reduce":
            dist.all_reduce(self.whole)
        elif variant in ("tensorwise", "official"):
            self.official.step(self.data, dist.get_rank(), window=variant == "official")
        else:
            for images, samples in self.data:
                torch.manual_seed(dist.get_rank())
                losses = self.engine(images, samples, mode="loss")
                self.engine.backward(self.engine.module.parse_losses(losses)[0])
                self.engine.step()
        dist.barrier()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    def _set_window(self, variant: str) -> None:
        modulator, capture = self.optimizer.modulator, self.optimizer._attachment.capture
        in_window = variant in ("halves", "replicas")
        modulator.is_window = lambda step: in_window
        if in_window:
            modulator.estimator = variant
            capture.use(self.optimizer.companion)

    def close(self) -> None:
        self.optimizer.detach()
        self.engine.destroy()


def start_rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    from engine.zero.processes import import_deepspeed, init_distributed

    init_distributed(init_method=f"file://{store}", rank=rank, world_size=2)
    import_deepspeed().logger.setLevel("ERROR")


def benchmark(rank: int, store: str, args: argparse.Namespace) -> None:
    start_rank(rank, store)
    from engine.zero.recording import CollectiveRecorder, with_all_to_all_totals

    for accumulation in args.accumulation:
        bench = Bench(args, accumulation)
        for variant in VARIANTS:  # warm up, with AGVM's self-check
            bench.step(variant)
        sent, seconds = {}, {variant: [] for variant in VARIANTS}
        for variant in VARIANTS:
            with CollectiveRecorder() as recorder:
                bench.step(variant)
            sent[variant] = sent_bytes(with_all_to_all_totals(recorder.calls))
        order = random.Random(0)
        for _ in range(args.blocks):
            for variant in order.sample(VARIANTS, len(VARIANTS)):
                seconds[variant].append(bench.step(variant))
        if rank == 0:
            report(args, accumulation, sent, seconds, sum(p.numel() for p in bench.official.model.parameters()))
        bench.close()


def interval(values: list[float]) -> str:
    """Mean and half a 95 % confidence interval."""
    n = len(values)
    student = STUDENT[min(n - 2, len(STUDENT) - 1)] if n > 1 else math.nan
    half = student * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return f"{statistics.mean(values):7.3f} +- {half:.3f}"


def report(args: argparse.Namespace, accumulation: int, sent: dict, seconds: dict, parameters: int) -> None:
    for variant in ("plain", "tensorwise"):
        wall, cpu = (interval([pair[k] for pair in seconds[variant]]) for k in (0, 1))
        print(
            f"stage {args.stage}, {args.rule}, K = {accumulation}, {args.blocks} blocks: {variant} step {wall} s "
            f"({cpu} s of CPU), {sent[variant] / 1e6:.0f} MB sent per rank",
            flush=True,
        )
    print("window       extra seconds   extra CPU seconds  extra MB  bytes/plain  of a step: tau 10     tau 5")
    for variant, base in BASELINE.items():
        wall, cpu = ([x[k] - y[k] for x, y in zip(seconds[variant], seconds[base])] for k in (0, 1))
        share = statistics.mean(wall) / statistics.mean(pair[0] for pair in seconds[base])
        print(
            f"{variant:8s} {interval(wall):>17s} {interval(cpu):>19s} {(sent[variant] - sent[base]) / 1e6:9.0f} "
            f"{sent[variant] / sent['plain']:12.2f} {share / 10:18.2%} {share / 5:9.2%}",
            flush=True,
        )
    wall, cpu = (interval([pair[k] for pair in seconds["all-reduce"]]) for k in (0, 1))
    print(f"one all-reduce of the model: {wall} s ({cpu} s of CPU), {sent['all-reduce'] / 1e6:.0f} MB", flush=True)
    window = 2 * parameters / (args.bandwidth * 1e9)  # half of the model, in fp32
    print(
        f"the paper's step ({PAPER_STEP:.3f} s on {PAPER_RANKS} A100s), at {args.bandwidth:g} GB/s per GPU, nothing "
        f"hidden behind backward: a window of {1e3 * window:.1f} ms, {window / PAPER_STEP / 10:.2%} at tau 10, "
        f"{window / PAPER_STEP / 5:.2%} at tau 5 (the paper reports {PAPER_SHARE:.2%} of its step on 128)\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--rule", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--bucket-size", type=int, default=1 << 22)
    parser.add_argument(
        "--bandwidth", type=float, default=25.0, help="GB/s per GPU, for the paper's step (25: one 200 Gb/s link each)"
    )
    args = parser.parse_args()
    mp.spawn(benchmark, args=(tempfile.mktemp(), args), nprocs=2)


if __name__ == "__main__":
    main()
