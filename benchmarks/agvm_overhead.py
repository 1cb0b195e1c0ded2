"""What an AGVM window costs: seconds and bytes over a plain step, both estimators, against the official scheme.

One run on two gloo ranks, Faster R-CNN R50, fixed pictures; every block has one step of each variant in random order,
and the extra time of a window is its difference to the plain step of its own block. CPU seconds are a rank's own,
which other load on the machine disturbs less than the clock. Bytes are counted from the collectives themselves, as
what a rank sends on average in a ring (all-reduce 2 (N-1)/N, the others (N-1)/N of the payload). The official scheme
gathers two whole gradients tensor by tensor; its all-reduce tensor by tensor, in place of DeepSpeed's bucketed one,
is not counted, so its figures are a lower bound.

    python benchmarks/agvm_overhead.py --blocks 6 --size 256 --accumulation 1 4
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

VARIANTS = ("plain", "halves", "replicas", "official")
PAPER_STEP = 0.0012         # AGVM's share of a step that the paper reports
# 97.5 % points of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class SentBytes(TorchDispatchMode):
    """Bytes a rank sends, from the c10d operators that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__
            share = (dist.get_world_size() - 1) / dist.get_world_size()
            # Gathers name their outputs first, reductions and broadcasts their payload.
            leaves = tree_leaves(args[1] if "scatter" in name else args[0])
            size = sum(t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
            self.total += share * (2 if name == "allreduce_" else 1) * size
        return function(*args, **(kwargs or {}))


def build_engine(args: argparse.Namespace, accumulation: int):
    import deepspeed
    import models  # noqa: F401  (CPU kernels of mmcv's ops)
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.hub import get_config

    from engine.optim import AGVMAdamW, AGVMSGD, module_groups

    register_all_modules()
    config = get_config("mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py").model
    config.backbone.init_cfg = None
    torch.manual_seed(0)
    model = MODELS.build(config).train()
    rule = {"adamw": AGVMAdamW, "sgd": AGVMSGD}[args.rule]
    optimizer = rule(module_groups(model), lr=1e-5, tau=10)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": args.batch, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1 << 24}})
    optimizer.attach(engine, bucket_size=args.bucket_size)
    return engine, optimizer


def pictures(args: argparse.Namespace, j: int):
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    generator = torch.Generator().manual_seed(j)
    samples = []
    for _ in range(args.batch):
        corners = torch.rand(4, 2, generator=generator) * args.size * 0.5
        sample = DetDataSample(metainfo=dict(img_shape=(args.size, args.size), pad_shape=(args.size, args.size),
                                             batch_input_shape=(args.size, args.size), scale_factor=(1.0, 1.0)))
        sample.gt_instances = InstanceData(bboxes=torch.cat([corners, corners + args.size * 0.3], 1),
                                           labels=torch.arange(4))
        samples.append(sample)
    return torch.randn(args.batch, 3, args.size, args.size, generator=generator), samples


class Official:
    """Whole local gradients kept, gathered tensor by tensor, and compared whole, as the official code does."""

    def __init__(self, engine) -> None:
        self.on, self.kept = False, {}
        for p in engine.module.parameters():
            if p.requires_grad:
                p.register_hook(lambda g, p=p: self.keep(p, g))

    def keep(self, p, g) -> None:
        if self.on:
            self.kept[p] = self.kept[p] + g if p in self.kept else g.clone()

    def compare(self) -> None:
        for g in self.kept.values():
            halves = [torch.empty_like(g, memory_format=torch.contiguous_format) for _ in range(2)]
            dist.all_gather(halves, g.contiguous())
            torch.nn.functional.cosine_similarity(halves[0].flatten(), halves[1].flatten(), dim=0)
        self.kept = {}


def benchmark(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    from engine.distributed import init_distributed

    init_distributed(init_method=f"file://{store}", rank=rank, world_size=2)
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    for accumulation in args.accumulation:
        engine, optimizer = build_engine(args, accumulation)
        official, capture = Official(engine), optimizer._attachment.capture
        data = [pictures(args, k * 2 + rank) for k in range(accumulation)]

        def step(variant: str) -> tuple[float, float]:
            optimizer.modulator.is_window = lambda t: variant in ("halves", "replicas")
            if variant in ("halves", "replicas"):
                optimizer.modulator.estimator = variant
                capture.kind = optimizer.companion
                capture.once = capture.kind == "signed" and capture.layout.keeps_local and accumulation > 1
            official.on = variant == "official"
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            for images, samples in data:
                torch.manual_seed(rank)
                engine.backward(engine.module.parse_losses(engine(images, samples, mode="loss"))[0])
                if official.on and engine.is_gradient_accumulation_boundary():
                    official.compare()
                engine.step()
            dist.barrier()
            return time.perf_counter() - start[0], time.process_time() - start[1]

        for variant in ("plain", "halves", "replicas"):                          # warm up; the self-check
            step(variant)
        sent, seconds = {}, {variant: [] for variant in VARIANTS}
        for variant in VARIANTS:
            with SentBytes() as counter:
                step(variant)
            sent[variant] = counter.total
        order = random.Random(0)
        for _ in range(args.blocks):
            for variant in order.sample(VARIANTS, len(VARIANTS)):
                seconds[variant].append(step(variant))
        if rank == 0:
            report(args, accumulation, sent, seconds)
        optimizer._attachment.detach()
        engine.destroy()
        del engine, optimizer, official, capture


def interval(values: list[float]) -> str:
    """Mean and half a 95 % confidence interval."""
    n = len(values)
    student = STUDENT[min(n - 2, len(STUDENT) - 1)] if n > 1 else math.nan
    half = student * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return f"{statistics.mean(values):7.3f} +- {half:.3f}"


def report(args: argparse.Namespace, accumulation: int, sent: dict, seconds: dict) -> None:
    plain, plain_cpu = (statistics.mean(pair[k] for pair in seconds["plain"]) for k in (0, 1))
    print(f"\nstage {args.stage}, {args.rule}, K = {accumulation}, {args.blocks} blocks: plain step {plain:.3f} s "
          f"({plain_cpu:.3f} s of CPU), {sent['plain'] / 1e6:.0f} MB sent per rank", flush=True)
    print("window     extra seconds       extra CPU seconds   extra MB  bytes/plain  share of a step (CPU), tau 10 / 5")
    for variant in VARIANTS[1:]:
        wall, cpu = ([x[k] - y[k] for x, y in zip(seconds[variant], seconds["plain"])] for k in (0, 1))
        share = statistics.mean(cpu) / plain_cpu
        print(f"{variant:8s} {interval(wall):>19s} {interval(cpu):>19s} {(sent[variant] - sent['plain']) / 1e6:9.0f} "
              f"{sent[variant] / sent['plain']:11.2f} {share / 10:18.2%} / {share / 5:.2%}", flush=True)
    print(f"(the paper reports {PAPER_STEP:.2%} of a step)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--rule", default="adamw", choices=("adamw", "sgd"))
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--bucket-size", type=int, default=1 << 22)
    args = parser.parse_args()
    mp.spawn(benchmark, args=(tempfile.mktemp(), args), nprocs=2)


if __name__ == "__main__":
    main()
