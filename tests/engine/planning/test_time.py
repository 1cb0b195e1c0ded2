"""Seconds from counted work and known collectives, on numbers that can be checked by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from traced_plan import CARD, traced_plan

from engine.errors import ConfigError, UserError
from engine.planning.hardware import find_hardware
from engine.planning.image_sizes import Size
from engine.planning.memory import OFFLOADS
from engine.planning.plan import Plan, Way
from engine.planning.step_trace import Cost
from engine.planning.time import calibrated, collective_seconds, compute_seconds, run_time, step_time
from engine.recipes.load import parse_config
from engine.zero.recording import Use


def test_an_operator_takes_the_longest_of_launch_arithmetic_and_memory():
    assert compute_seconds(Counter({Cost(0, 8, "float32"): 3}), CARD) == pytest.approx(3e-5)
    assert compute_seconds(Counter({Cost(78 * 10**12, 8, "float32"): 1}), CARD) == pytest.approx(1.0)
    assert compute_seconds(Counter({Cost(78 * 10**12, 8, "bfloat16"): 1}), CARD) == pytest.approx(0.5)
    assert compute_seconds(Counter({Cost(1, int(2.039e12), "float32"): 1}), CARD) == pytest.approx(2.0)


def test_a_ring_sends_twice_for_a_reduction_and_pays_for_distance():
    assert collective_seconds("all_reduce", 10**9, 1, CARD) == 0
    inside = collective_seconds("all_reduce", 10**9, 8, CARD)
    assert inside == pytest.approx(3e-5 + 2 * 7 / 8 * 1e9 / 240e9)
    assert collective_seconds("all_gather", 10**9, 8, CARD) == pytest.approx(3e-5 + 7 / 8 * 1e9 / 240e9)
    assert collective_seconds("all_reduce", 10**9, 16, CARD) == pytest.approx(4e-5 + 2 * 15 / 16 * 1e9 / 200e9)


def test_a_step_is_compute_communication_and_the_update():
    step = step_time(traced_plan(), CARD)
    assert (step.forward, step.backward) == (pytest.approx(0.01), pytest.approx(0.02))
    assert step.gradients == pytest.approx(collective_seconds("all_reduce", 4 * 10**7, 8, CARD))
    assert step.statistics == pytest.approx(5 * collective_seconds("all_reduce", 1000, 8, CARD))
    assert step.optimizer == pytest.approx(4 * 7 * 10**7 / (0.5 * 2.039e12))


def test_a_window_counts_by_how_often_it_comes():
    by_hand = sum(collective_seconds("all_reduce", size, 8, CARD) for size in (8 * (4 + 3), 8 * 3))
    # Two buckets, each reduced by four of the eight ranks and then handed to all.
    for size in (4 * 2**23, 4 * (10**7 - 2**23)):
        by_hand += 2 * 3 * CARD.latency + (size * 3 / 8 + size * 7 / 64) / CARD.bus(8)
    for tau in (5, 10):
        plan = traced_plan(optimizer={"type": "AGVMAdamW", "params": {"lr": 1e-4, "tau": tau}})
        assert step_time(plan, CARD).window == pytest.approx(by_hand / tau)


def test_gradients_and_fetched_weights_do_not_hide_behind_the_same_backward():
    # A slow network, on which either is longer than half of backward and shorter than forward and backward together.
    plan = traced_plan(zero_optimization={"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0})
    plan.model = replace(plan.model, uses=[Use(0, (0,), begin) for begin in (True, False, True, False)])
    slow = replace(CARD, intra_bandwidth=1.5e9)
    sent = collective_seconds("reduce_scatter", 4 * 10**7, 8, slow)
    assert 0.02 < sent < 0.03
    step = step_time(plan, slow)
    assert step.gradients == pytest.approx(sent - 0.02)  # as long as backward is hidden
    assert step.weights == pytest.approx(sent - 0.01)  # only forward is left


def test_offloaded_parameters_come_from_the_host_for_every_gather():
    plan = traced_plan(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    plan.model = replace(plan.model, uses=[Use(0, (0,), begin) for begin in (True, False, True, False)])
    less, more = (step_time(plan, CARD, Way(3, offload, recompute=False)) for offload in OFFLOADS[1:])
    assert more.total - less.total == pytest.approx(4 * 10**7 / 8 / CARD.host_bandwidth)


def test_accumulation_repeats_compute_and_not_the_reduction():
    once, four = step_time(traced_plan(), CARD), step_time(traced_plan(batch=64), CARD)
    assert four.backward == pytest.approx(4 * once.backward)
    assert four.gradients == pytest.approx(once.gradients)


def test_ranks_wait_for_the_largest_micro_batch_in_every_accumulated_micro_step():
    once, four = traced_plan(), traced_plan(batch=64)
    for plan in (once, four):
        plan.sizes.pixels = np.array([64 * 64, 2 * 64 * 64])
        plan.sizes.largest = Size(64, 128)
        trace = plan._traces[Size(64, 64), False, 2]
        double = Counter({cost: 2 * count for cost, count in trace.backward.items()})
        plan._traces[Size(64, 128), False, 2] = replace(trace, size=Size(64, 128), backward=double)
    assert step_time(once, CARD).backward > 0.039  # almost always one of 8 ranks has the large one
    assert step_time(four, CARD).backward == pytest.approx(4 * step_time(once, CARD).backward)


def test_a_run_has_the_steps_of_its_epochs_and_its_evaluations_and_checkpoints():
    time = run_time(traced_plan(), CARD)
    assert time.steps == 4 * math.ceil(100 / 16)
    assert time.evaluation == pytest.approx(2 * math.ceil(10 / 8) * 0.005)
    assert time.checkpoints == pytest.approx(4 * 10**7 * (4 + 12) / CARD.disk)
    assert time.hours * 3600 == pytest.approx(28 * time.step.total + time.evaluation + time.checkpoints)
    assert time.gpu_hours == pytest.approx(8 * time.hours)
    assert time.images_per_second == pytest.approx(16 / time.step.total)


def test_calibration_finds_the_share_that_gives_the_measured_step():
    plan = traced_plan()
    truth = step_time(plan, find_hardware("a100-80g", ["efficiency=0.21"])).total
    assert calibrated(plan, CARD, truth).efficiency != pytest.approx(0.21, rel=1e-3)  # another launch and latency
    assert calibrated(plan, find_hardware("a100-80g"), truth).efficiency == pytest.approx(0.21, rel=1e-6)


@pytest.mark.parametrize("measured, told", [(0.0, "more than 0 seconds"), (1e-9, "cannot be"), (1e9, "cannot be")])
def test_a_step_that_no_share_explains_is_told(measured, told):
    with pytest.raises(UserError, match=told):
        calibrated(traced_plan(), CARD, measured)


def test_other_numbers_of_ranks_share_the_trace_and_refuse_what_cannot_be_divided():
    plan = traced_plan()
    other = plan.at(32, 128)
    assert (other.batch.accumulation, other.world) == (2, 32)
    assert step_time(other, CARD).backward == pytest.approx(0.04)
    assert plan.world == 8
    with pytest.raises(ConfigError, match="cannot be divided"):
        plan.at(32, 100)


def test_wrong_numbers_are_told():
    with pytest.raises(UserError, match="--world-size must be a whole number >= 1, got 0"):
        traced_plan(world=0)
    config = parse_config(
        {
            "train_batch_size": 2,
            "detector": {"config": "tiny_retinanet"},
            "optimizer": {"type": "SGD", "params": {"lr": 1}},
            "data": {
                "train": {"annotations": "a.json", "images": "a"},
                "val": {"annotations": "b.json", "images": "b"},
            },
            "schedule": {"epochs": 1},
        }
    )
    with pytest.raises(UserError, match="give --images, the number of training images"):
        Plan(config, 2)
    with pytest.raises(UserError, match="give --classes"):
        Plan(config, 2, images=10)
    with pytest.raises(UserError, match="--images must be a whole number >= 1, got 0"):
        Plan(config, 2, images=0)
    assert Plan(config, 2, images=10, classes=3).steps == 5
