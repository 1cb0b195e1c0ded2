"""Collectives and kernels of an AGVM window, and kernels of a layer-wise step, on many ranks, by count.

The run of a config is built as one rank of N, without the others and without storage, as a dry run does. Collectives
are the planner's, which equal those of real ranks (tests/engine/planning/test_traffic.py). Kernels are counted while
the sums over this rank's partition are formed on tensors without data, with a GPU's slices.

    python benchmarks/agvm_counts.py --config paper/uninet_g_htcx_agvm_adamw_960 --stages 2 3 --worlds 8 64 480
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.config.batch import solve_batch  # noqa: E402
from engine.config.schema import OptimizerConfig  # noqa: E402
from engine.optim.attaching import attach  # noqa: E402
from engine.optim.registry import build_optimizer  # noqa: E402
from engine.planning.known_data import planned_classes  # noqa: E402
from engine.planning.model_facts import model_facts  # noqa: E402
from engine.planning.step_trace import build_empty_model  # noqa: E402
from engine.planning.traffic import step_calls, step_traffic  # noqa: E402
from engine.recipes.load import load_config  # noqa: E402
from engine.tasks.registry import task_of  # noqa: E402
from engine.train.build import resolve  # noqa: E402
from engine.zero.engine import initialise_engine, read_layout  # noqa: E402
from engine.zero.fake_ranks import fake_ranks, on_meta  # noqa: E402
from engine.zero.recording import KernelCounter  # noqa: E402
from engine.zero.settings import communication_settings  # noqa: E402


def built(config: Any, plan: Any) -> tuple[Any, Any]:
    """The optimizer, attached to an engine on the meta device, and the facts for the planner."""
    config = resolve(config, plan, Path("work_dirs"))
    model = build_empty_model(config, planned_classes(task_of(config).usual_data))
    optimizer = build_optimizer(config.optimizer, model, warmup_steps=0)
    facts = model_facts(model, optimizer, config)
    optimizer.step = lambda closure=None: None
    engine = initialise_engine(model, optimizer, config.deepspeed)
    attach(config.optimizer, engine, optimizer, read_layout(engine))
    return optimizer, facts


def pretend_gradients(layout: Any) -> None:
    layout.gradient = lambda fragment: torch.empty(fragment.stop - fragment.start, device="meta")


def pretend_state(optimizer: Any, layout: Any) -> None:
    for shard in layout.shards().values():
        optimizer.state[shard] = {"step": 1, **{k: torch.empty_like(shard) for k in ("exp_avg", "exp_avg_sq")}}


def window_kernels(optimizer: Any) -> int:
    attachment = optimizer._attachment
    capture, layout = attachment.capture, attachment.layout
    capture.all_reduce = lambda tensor: torch.zeros(tensor.shape, device="cpu")
    layout.factors = lambda norm: (1.0, 1.0)
    if capture.kind == "signed":
        capture.share = torch.empty(capture.plan.numel, device="meta")
    with KernelCounter() as counter:
        attachment._sums([True] * len(layout.params), 1.0)
    return counter.count


def step_kernels(optimizer: Any) -> int:
    """The sums of a layer-wise rule before a step."""
    norms = optimizer._norms
    norms._all_reduce = lambda tensor: torch.ones(tensor.shape, device="cpu")
    norms.layout.factors = lambda norm: (1.0, 1.0)
    with KernelCounter() as counter:
        norms._measure()
    return counter.count


def count(args: argparse.Namespace, stage: int, world: int, optimizer: str) -> str:
    batch = [f"train_batch_size={2 * world}", "gradient_accumulation_steps=1", "train_micro_batch_size_per_gpu=2"]
    config = load_config(args.config, [f"zero_optimization.stage={stage}", "gradient_clipping=0", *batch])
    chosen = OptimizerConfig(type=optimizer, params={"lr": 1e-4})
    config = config.model_copy(update={"optimizer": chosen})
    plan = solve_batch(config.deepspeed, world)
    with contextlib.redirect_stdout(io.StringIO()), fake_ranks(world), on_meta():
        rule, facts = built(config, plan)
        layout = (getattr(rule, "_attachment", None) or rule._norms).layout
        pretend_gradients(layout)
        pretend_state(rule, layout)
        row = [optimizer, str(stage), str(world), f"{len(layout.fragments):,}"]
        if getattr(rule, "_attachment", None) is not None:
            settings = communication_settings({**config.deepspeed, **plan.as_keys()}, world, 1)
            calls = step_calls(
                (c for c in step_traffic(facts, settings) if c.purpose == "second gradient"), 1, window=True
            )
            row += [f"{calls.total():,}", f"{window_kernels(rule):,}"]
        else:
            row += ["-", "-"]
        row.append(f"{step_kernels(rule):,}" if getattr(rule, "_norms", None) is not None else "-")
    return "| " + " | ".join(row) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="paper/uninet_g_htcx_agvm_adamw_960")
    parser.add_argument("--optimizers", nargs="+", default=["AGVMAdamW", "LAMB"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 480, 768])
    args = parser.parse_args()
    print("| optimizer | stage | ranks | fragments | collectives of a window | its kernels | of a layer-wise step |")
    print("|---|---|---|---|---|---|---|")
    for optimizer in args.optimizers:
        for stage in args.stages:
            for world in args.worlds:
                print(count(args, stage, world, optimizer), flush=True)


if __name__ == "__main__":
    main()
