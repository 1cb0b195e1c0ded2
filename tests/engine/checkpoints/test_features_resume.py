"""What else a checkpoint carries: rank-local statistics, half precision, loss scale, frozen and shared parameters,
evaluations that were still to do."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from resumed_run import BATCH_NORM, STEPS, assert_same_runs, compared, results, same, settings, straight_and_resumed
from tiny_run import merged, saved_weights, train_tiny

FROZEN = ["backbone.conv1", "backbone.layer1", "neck.lateral_convs"]
BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
# Features that have nothing to do with each other share a run. LARS, LAMB and AGVM: test_resume_exactly.py.
CASES = {
    "statistics of each rank, no momentum": (2, settings("SGD", 2, **BATCH_NORM, optimizer={"params": {"lr": 0.01}})),
    "statistics at ZeRO-3, momentum": (2, settings("SGD", 3, **BATCH_NORM)),
    "bf16 at stage 0": (2, settings("AdamW", 0, **BF16)),
    "bf16 at stage 1": (2, settings("AGVMAdamW", 1, **BF16)),
    "bf16 with fp32 accumulation": (2, settings("AdamW", 1, **BF16, data_types={"grad_accum_dtype": "fp32"})),
    "bf16 at stage 3": (2, settings("AGVMSGD", 3, **BF16)),
    "frozen and offloaded": (
        2,
        settings("AdamW", 2, detector={"frozen": FROZEN}, zero_optimization={"stage": 2, **OFFLOADED}),
    ),
    "offloaded at ZeRO-3": (
        2,
        settings("AdamW", 3, zero_optimization={"stage": 3, "sub_group_size": 5000, **OFFLOADED}),
    ),
    "built partitioned, frozen at ZeRO-3": (2, settings("AdamW", 3, detector={"zero_init": True, "frozen": FROZEN})),
    "round robin and clipping": (
        2,
        settings("AGVMSGD", 2, zero_optimization={"stage": 2, "round_robin_gradients": True}, gradient_clipping=0.1),
    ),
    "bf16 throughout": (
        2,
        settings(
            "AdamW", 3, bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        ),
    ),
    "skippable and frozen": (
        2,
        settings(
            "AdamW",
            3,
            detector={"skippable": ["bbox_head"], "frozen": ["bbox_head.retina_cls", "backbone.conv1"]},
            run={"eval_interval": 0.67, "draw": 0},
        ),
    ),
    "one rank": (1, settings("AGVMSGD", 1)),
    "four ranks": (4, settings("AGVMAdamW", 3)),
    "SAM": (2, settings("AGVMSGD", 2, optimizer={"sam": {"rho": 0.05}})),
}


def compare(changes: dict, steps: int = 4) -> dict:
    return compared(*straight_and_resumed(changes, steps))


@pytest.mark.parametrize("case", CASES)
def test_interrupted_is_uninterrupted(ranks, case):
    world, changes = CASES[case]
    for outcome in ranks.run(compare, world, changes):
        assert_same_runs(outcome, 4)


def compare_fp16(changes: dict) -> tuple:
    """DeepSpeed refuses fp16 on most CPUs."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())
    supported, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda self: True
    try:
        return compare(changes, STEPS)
    finally:
        accelerator.is_fp16_supported = supported


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loss_scale_goes_on_where_it_was(ranks, stage):
    # It overflows in step 2 (not at stage 0, where DeepSpeed checks nothing) and rises after two steps that do not: the
    # resumed run must know how many there were.
    fp16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    for outcome in ranks.run(compare_fp16, 2, settings("AdamW", stage, fp16=fp16)):
        assert_same_runs(outcome, STEPS)
        scales = [math.log2(record["loss_scale"]) for record in outcome["records"][1]]
        assert scales == ([16, 15, 15, 15, 16, 16] if stage else [16, 16, 17, 17, 18, 18])


def half_later(changes: dict) -> dict:
    from deepspeed.accelerator import get_accelerator

    first = train_tiny(changes, stop_after=2)
    accelerator = type(get_accelerator())
    supported, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda self: True
    try:
        return train_tiny(
            merged({"fp16": {"enabled": True, "initial_scale_power": 8}}, changes), work_dir=first["folder"], resume=""
        )
    finally:
        accelerator.is_fp16_supported = supported


def test_a_run_that_turns_to_fp16_begins_with_the_loss_scale_of_its_config(ranks):
    outcome = ranks.run(half_later, 2, settings("AdamW", 2))[0]
    assert [record.get("loss_scale") for record in outcome["records"]] == [None, None, *[256.0] * 4]


SHARED = {  # the second name of each is the first parameter too
    "bbox_head.reg_convs.0.conv.weight": "bbox_head.cls_convs.0.conv.weight",
    "neck.fpn_convs.1.conv.weight": "neck.fpn_convs.0.conv.weight",
}


def compare_shared(changes: dict) -> dict:
    """Two pairs of convolutions are one parameter each."""
    from engine.tasks.detection import Detection

    build = Detection.build_model

    def tied(self, classes):
        model = build(self, classes)
        for second, first in SHARED.items():
            model.get_submodule(second.removesuffix(".weight")).weight = model.get_parameter(first)
        return model

    Detection.build_model = tied
    try:
        return compare(changes)
    finally:
        Detection.build_model = build


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_shared_parameters_trained_and_frozen_stay_shared_and_are_exported_under_all_names(ranks, stage, tmp_path):
    """Those of the head are trained, those of the neck are frozen."""
    from engine.inference.export import export_universal, export_weights

    outcome = ranks.run(compare_shared, 2, settings("SGD", stage, detector={"frozen": ["neck.fpn_convs"]}))[0]
    assert_same_runs(outcome, 4)
    weights, _ = outcome["weights"]
    for file in ("shared.pth", "shared.safetensors"):
        export_weights(outcome["folder"], tmp_path / file)
    with contextlib.redirect_stdout(None):
        export_universal(outcome["folder"], tmp_path / "universal")
    for name in ("shared.pth", "shared.safetensors", "universal"):
        tensors = {name: value.float() for name, value in saved_weights(tmp_path / name)[0].items()}
        assert same(tensors, weights)
        assert all(tensors[second].equal(tensors[first]) for second, first in SHARED.items())


def interrupted_in_evaluation(changes: dict) -> tuple:
    """A run killed inside its evaluation at step 3: the checkpoint is there, the evaluation is not."""
    from engine import distributed
    from engine.train import after_step

    straight = train_tiny(changes)
    report = after_step.evaluate_and_report

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    after_step.evaluate_and_report = killed
    with contextlib.suppress(KeyboardInterrupt, UnboundLocalError):
        train_tiny(changes, work_dir=work_dir)
    after_step.evaluate_and_report = report
    broken = train_tiny(changes, work_dir=work_dir, resume="")
    # And once more from its end: nothing is computed twice.
    again = train_tiny(changes, work_dir=work_dir, resume="")
    return straight, broken, again


def evaluations(outcome: dict) -> list[dict]:
    return [json.loads(line) for line in (Path(outcome["folder"]) / "evaluations.jsonl").read_text().splitlines()]


def test_an_evaluation_that_was_cut_off_is_made_up_for(ranks):
    changes = settings("SGD", 2, **BATCH_NORM, run={"eval_interval": 1.0, "draw": 0})
    straight, broken, again = ranks.run(interrupted_in_evaluation, 2, changes)[0]
    assert [e["step"] for e in evaluations(straight)] == [3, 6]
    assert evaluations(straight) == evaluations(broken) == evaluations(again)
    assert results(straight) == results(broken) == results(again)
    assert same(straight["weights"], broken["weights"]) and same(straight["weights"], again["weights"])
    assert straight["metrics"] == broken["metrics"] == again["metrics"] != {}


def longer(changes: dict, more: dict) -> tuple:
    first = train_tiny(changes)
    return first, train_tiny(merged(more, changes), work_dir=first["folder"], resume="")


def test_a_finished_run_goes_on_when_its_schedule_is_extended(ranks):
    first, second = ranks.run(longer, 2, settings("SGD", 2), {"schedule": {"steps": 8}})[0]
    assert [record["step"] for record in second["records"]] == list(range(1, 9))
    assert results(first) == results(second)[:6]
    assert "changed, from here on   schedule.steps: 6 -> 8" in second["printed"]


def averaged_later(changes: dict) -> tuple:
    first = train_tiny(merged({"run": {"ema": None}}, changes), stop_after=2)
    return train_tiny(changes, work_dir=first["folder"], resume=""), first["weights"]


def test_an_average_that_is_switched_on_later_begins_at_the_weights_of_that_step(ranks):
    outcome, begun = ranks.run(averaged_later, 2, settings("SGD", 2, schedule={"steps": 3}))[0]
    average, decay = saved_weights(outcome["folder"], ema=True)[0], (1 + 3) / (10 + 3)
    for name, weights in outcome["weights"].items():
        torch.testing.assert_close(average[name], decay * begun[name] + (1 - decay) * weights, rtol=1e-5, atol=1e-7)


def own_average(changes: dict) -> tuple:
    """The average of a run, and one computed by hand from the weights after every step."""
    from engine.train import loop
    from engine.zero.whole_parameters import whole_state

    seen: list[dict] = []
    record = loop.step_record

    def watch(run, step, *args, **kwargs):
        seen.append({name: value.double().clone() for name, value in whole_state(run.engine.module)})
        return record(run, step, *args, **kwargs)

    loop.step_record = watch
    try:
        outcome = train_tiny(changes)
    finally:
        loop.step_record = record
    return outcome["folder"], seen


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_is_the_one_computed_by_hand(ranks, stage):
    start = ranks.run(
        own_average,
        2,
        settings("SGD", stage, schedule={"steps": 1, "warmup_steps": 0}, optimizer={"params": {"lr": 0.0}}),
    )[0][1][0]
    folder, seen = ranks.run(own_average, 2, settings("SGD", stage))[0]
    average = dict(start)
    for step, weights in enumerate(seen, 1):
        decay = min(0.9, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    saved = saved_weights(folder, ema=True)[0]
    assert len(saved) == len(average)
    for name, value in saved.items():
        torch.testing.assert_close(value.double(), average[name], rtol=1e-5, atol=1e-7)
