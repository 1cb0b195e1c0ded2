"""What a step of each optimizer costs compared with AdamW: seconds, bytes sent, bytes of state.

One run on two gloo ranks, Faster R-CNN, fixed images, ZeRO-2 by default. Every optimizer has its own engine. Each
block has one step of every optimizer in random order; the extra cost of a step is the difference to the AdamW step of
the same block. CPU seconds are those of rank 0; other load on the machine disturbs them less than the clock. "update"
are the CPU seconds after the last backward (for SAM, that of its second pass). AGVM's steps all have a window, which on
average costs 1/tau of that. Bytes sent are counted from the collectives, as what a rank sends on average in a ring, and
bytes of state from the tensors of the optimizer on rank 0: both are exact.

    python benchmarks/optimizer_cost.py --blocks 8 --depth 18 --size 192
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from agvm_overhead import detector, interval, pictures, sent_bytes, start_rank

BASE = "AdamW"
OPTIONS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "LARS": {},
    "LAMB": {},
    "PMDLAMB": {"period": 10, "factor": 0.5},
    "AGVMAdamW": {"tau": 1},
    "AGVMLAMB": {"tau": 1},
    "SAM": {},
}


class Contender:
    """One optimizer with its own engine."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import deepspeed

        import engine.optim
        from engine.optim.sam import SharpnessAware
        from engine.zero.layout import layout_of

        model = detector(args.depth)
        rule = "AdamW" if name == "SAM" else name
        kind = getattr(engine.optim if rule in engine.optim.__all__ else torch.optim, rule)
        self.optimizer = kind(engine.optim.module_groups(model), lr=1e-6, **OPTIONS[name])
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": args.batch,
                "gradient_accumulation_steps": args.accumulation,
                "gradient_clipping": args.clip,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 1 << 24},
            },
        )
        if hasattr(self.optimizer, "attach"):
            self.optimizer.attach(self.engine)
        self.sam = SharpnessAware(self.engine, self.optimizer, layout_of(self.engine), 0.05) if name == "SAM" else None

    def backward(self, batch: tuple) -> int:
        images, samples = batch
        torch.manual_seed(dist.get_rank())
        self.engine.backward(self.engine.module.parse_losses(self.engine(images, samples, mode="loss"))[0])
        self.after_backward = time.process_time()
        return 0

    def step(self, data: list) -> tuple[float, float, float]:
        """Seconds of a step by the clock, CPU seconds of this process, and those after the last backward."""
        dist.barrier()
        clock, own = time.perf_counter(), time.process_time()
        for batch in data:
            if self.sam is None:
                self.backward(batch)
                self.engine.step()
            else:
                self.backward(self.sam.keep(batch))
                self.sam.step(lambda k, again: self.backward(again))
        ended = time.process_time()
        dist.barrier()
        return time.perf_counter() - clock, ended - own, ended - self.after_backward

    def state_bytes(self) -> int:
        return sum(
            value.numel() * value.element_size()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def benchmark(rank: int, store: str, args: argparse.Namespace) -> None:
    start_rank(rank, store)
    from engine.zero.recording import CollectiveRecorder, with_all_to_all_totals

    data = [pictures(args, k * 2 + rank) for k in range(args.accumulation)]
    contenders = {name: Contender(name, args) for name in args.optimizers}
    sent, seconds = {}, {name: [] for name in contenders}
    for name, contender in contenders.items():
        contender.step(data)  # warm up, with AGVM's self-check
        with CollectiveRecorder() as recorder:
            contender.step(data)
        sent[name] = sent_bytes(with_all_to_all_totals(recorder.calls))
    order = random.Random(0)
    for _ in range(args.blocks):
        for name in order.sample(list(contenders), len(contenders)):
            seconds[name].append(contenders[name].step(data))
    if rank == 0:
        parameters = sum(p.numel() for p in contenders[BASE].engine.module.parameters() if p.requires_grad)
        report(args, sent, seconds, {name: c.state_bytes() for name, c in contenders.items()}, parameters)


def report(args: argparse.Namespace, sent: dict, seconds: dict, states: dict, parameters: int) -> None:
    print(
        f"Faster R-CNN R{args.depth}, {parameters / 1e6:.1f} M parameters, ZeRO-{args.stage}, 2 ranks x {args.batch} x "
        f"{args.size} pixels x {args.accumulation} accumulated, clipping {args.clip:g}, {args.blocks} blocks; +-: 95 %"
    )
    clock, own, update = (interval([row[k] for row in seconds[BASE]]) for k in range(3))
    print(
        f"{BASE}: step {clock} s by the clock, {own} s of CPU, update {update} s of CPU, {sent[BASE]:.0f} bytes sent, "
        f"{states[BASE]} bytes of state a rank"
    )
    print(
        f"{'more than ' + BASE:16} {'clock, s':>17} {'CPU, s':>17} {'':>7} {'update, CPU s':>17} {'bytes sent':>14} "
        f"{'':>8} {'state':>12}"
    )
    base = statistics.mean(row[1] for row in seconds[BASE])
    for name in seconds:
        if name != BASE:
            clock, own, update = ([x[k] - y[k] for x, y in zip(seconds[name], seconds[BASE])] for k in range(3))
            print(
                f"{name:16} {interval(clock):>17} {interval(own):>17} {statistics.mean(own) / base:>+7.1%} "
                f"{interval(update):>17} {sent[name] - sent[BASE]:>14.0f} {sent[name] / sent[BASE] - 1:>+8.3%} "
                f"{states[name] - states[BASE]:>12}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--depth", type=int, default=18, choices=(18, 50))
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    args = parser.parse_args()
    if BASE not in args.optimizers:
        parser.error(f"--optimizers must have {BASE}, which the others are compared with")
    mp.spawn(benchmark, args=(tempfile.mktemp(), args), nprocs=2)


if __name__ == "__main__":
    main()
