"""An AGVM step outside windows against torch's fused optimizer, on one flat shard of the same size.

Blocks of both in random order, in one process. Beside the seconds, the number of kernels.

    python benchmarks/step_cost.py --elements 10_000_000 100_000_000 --blocks 15
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.optim import AGVMSGD, AGVMAdamW  # noqa: E402
from engine.zero.recording import KernelCounter  # noqa: E402

RULES = {
    "AdamW": (AGVMAdamW, torch.optim.AdamW, dict(lr=1e-4, weight_decay=0.05)),
    "SGD": (AGVMSGD, torch.optim.SGD, dict(lr=1e-4, weight_decay=1e-4, momentum=0.9)),
}


def build(elements: int, rule: str) -> dict[str, torch.optim.Optimizer]:
    ours, theirs, options = RULES[rule]
    shards = [torch.nn.Parameter(torch.randn(elements)) for _ in range(2)]
    for shard in shards:
        shard.grad = torch.randn(elements)
    return {
        "ours": ours([{"params": [shards[0]], "module": "backbone"}], **options),
        "torch's, fused": theirs([shards[1]], fused=True, **options),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--blocks", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    order = random.Random(0)
    for rule in args.rules:
        for elements in args.elements:
            optimizers = build(elements, rule)
            seconds: dict[str, list[float]] = {name: [] for name in optimizers}
            kernels = {}
            for name, optimizer in optimizers.items():
                optimizer.step()
                with KernelCounter() as counter:
                    optimizer.step()
                kernels[name] = counter.count
            for _ in range(args.blocks):
                for name in order.sample(list(optimizers), 2):
                    start = time.perf_counter()
                    optimizers[name].step()
                    seconds[name].append(time.perf_counter() - start)
            ratios = [a / b for a, b in zip(*seconds.values())]
            print(
                f"{rule}, {elements / 1e6:g} M elements: "
                + ", ".join(
                    f"{name} {1e3 * statistics.median(s):.1f} ms ({kernels[name]} kernels)"
                    for name, s in seconds.items()
                )
                + f"; ratio {statistics.median(ratios):.3f} (median of {args.blocks}, "
                f"{min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
