"""A plan whose trace is given, for what follows from a trace: nothing is built, and sums can be checked by hand."""

from __future__ import annotations

from collections import Counter

from engine.planning.hardware import find_hardware
from engine.planning.image_sizes import Size
from engine.planning.model_facts import ModelFacts, Parameter, window_settings
from engine.planning.plan import Plan
from engine.planning.step_trace import Cost, GradientEvent, StepTrace
from engine.recipes.load import parse_config

CARD = find_hardware("a100-80g", ["efficiency=0.5", "launch=1e-5", "latency=1e-5"])


def traced_plan(world: int = 8, batch: int = 16, micro: int = 2, **changes) -> Plan:
    """One convolution forward, two backward (three where it is recomputed), a head of 10 million parameters."""
    config = parse_config(
        {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": micro,
            "detector": {"config": "tiny_retinanet"},
            "data": {"dataset": "shapes", "shapes": {"train_images": 100, "val_images": 10}, "keep_empty": True},
            "optimizer": {"type": "AGVMAdamW", "params": {"lr": 1e-4, "tau": 10}},
            "schedule": {"epochs": 4},
            "run": {"eval_interval": 2, "checkpoint_interval": 1},
            **changes,
        }
    )
    plan = Plan(config, world, fixed_size=Size(64, 64))
    window = window_settings(config.optimizer.type, config.optimizer.params)
    plan.model = ModelFacts([Parameter("head.weight", 10**7, "bbox_head", 0)], window=window)
    work = Cost(78 * 10**10, 8, "float32")
    for recompute in (False, True):
        plan._traces[plan.sizes.mean, recompute, micro] = StepTrace(
            2,
            Size(64, 64),
            0,
            0,
            [GradientEvent(0, 4 * 10**7, 0)],
            0,
            Counter({work: 1}),
            Counter({work: 3 if recompute else 2}),
            Counter({("all_reduce", 1000): 5}),
        )
    return plan
