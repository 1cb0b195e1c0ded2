"""Time UniNet's forward and backward against a naive version of itself and against the closest model of timm.

Naive: attention is the softmax of a product instead of the fused kernel, and maps are stored channels-first. Closest
model: a published mix of convolutions and attention, at the input size with the most similar FLOPs. The benchmark runs
blocks of one step of each model, in random order. Ratios are taken within a block, with a 95 % confidence interval.

    python benchmarks/uninet_speed.py --arch b1 --size 224 --batch 2 --rival edgenext_small
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import time
from pathlib import Path

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from models.uninet import blocks  # noqa: E402


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def naive(model: nn.Module) -> nn.Module:
    """The same weights without fused attention, and with maps stored channels-first."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    forward, stages = model.forward_stages, blocks.scaled_dot_product_attention

    def channels_first(x: Tensor, last: int) -> list[Tensor]:
        blocks.scaled_dot_product_attention = naive_attention
        contiguous = Tensor.contiguous
        # The network asks for channels-last once, at its input.
        Tensor.contiguous = lambda self, memory_format=torch.contiguous_format: contiguous(self)
        try:
            return forward(x, last)
        finally:
            blocks.scaled_dot_product_attention, Tensor.contiguous = stages, contiguous

    model.forward_stages = channels_first
    return model


def flops(model: nn.Module, size: int) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, size, size))
    return counter.get_total_flops() / 1e9


def interval(values: list[float]) -> str:
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} +- {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="b1")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rival", default="edgenext_small", help="a timm model (default edgenext_small)")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    ours = timm.create_model(f"uninet_{args.arch}").eval()
    rival = timm.create_model(args.rival).eval()
    work = flops(ours, args.size)
    size = min(range(128, 513, 32), key=lambda s: abs(flops(rival, s) - work))
    images = {"ours": torch.randn(args.batch, 3, args.size, args.size)}
    images["naive"], images["rival"] = images["ours"], torch.randn(args.batch, 3, size, size)
    models = {"ours": ours.train(), "naive": naive(ours).train(), "rival": rival.train()}

    def step(name: str) -> float:
        start = time.perf_counter()
        models[name](images[name]).square().mean().backward()
        return time.perf_counter() - start

    same = [models[name].eval()(images["ours"]) for name in ("ours", "naive")]
    assert torch.allclose(*same, rtol=1e-3, atol=1e-4), "the naive twin computes something else"
    for model in models.values():
        model.train()
    for name in models:
        step(name)
    seconds = {name: [] for name in models}
    order = random.Random(0)
    for _ in range(args.blocks):
        for name in order.sample(list(models), len(models)):
            seconds[name].append(step(name))
    print(
        f"uninet_{args.arch} at {args.size}: {work:.2f} GFLOPs, "
        f"{args.batch / statistics.mean(seconds['ours']):.2f} images/s forward and backward on {args.threads} thread(s)"
    )
    print(f"naive / ours: {interval([n / o for n, o in zip(seconds['naive'], seconds['ours'])])}")
    print(
        f"{args.rival} at {size} ({flops(rival.eval(), size):.2f} GFLOPs) / ours: "
        f"{interval([r / o for r, o in zip(seconds['rival'], seconds['ours'])])}"
    )


if __name__ == "__main__":
    main()
