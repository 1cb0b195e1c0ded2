"""Where bytes are by stage, on a hand-made trace whose sums can be checked by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine.config.schema import OptimizerConfig
from engine.optim.registry import count_moments
from engine.planning.image_sizes import Size
from engine.planning.memory import MemoryPlan
from engine.planning.model_facts import ModelFacts, Parameter, WindowSettings
from engine.planning.step_trace import GradientEvent, StepTrace
from engine.zero.recording import Use
from engine.zero.settings import communication_settings

# Three parameters of 1000, 3000 and 4000 elements, one of them frozen; gradients come in reverse.
PARAMETERS = [
    Parameter("a", 1000, "backbone", None),
    Parameter("b", 3000, "backbone", 0),
    Parameter("c", 4000, "head", 1),
]
EVENTS = [GradientEvent(2, 16000, 50_000), GradientEvent(1, 12000, 40_000)]
TRACE = StepTrace(
    micro=1,
    size=Size(32, 32),
    kept=45_000,
    forward_peak=48_000,
    gradients=EVENTS,
    backward_tail=5_000,
    forward=Counter(),
    backward=Counter(),
    collectives=Counter(),
)
USES = [
    Use(0, (), True),
    *(Use(k + 1, (k,), begin) for k in range(3) for begin in (True, False)),
    Use(0, (), False),
    Use(0, (), True),
    *(Use(k + 1, (k,), begin) for k in (2, 1) for begin in (True, False)),
    Use(0, (), False),
]


def _memory(
    stage: int,
    *,
    world: int = 2,
    accumulation: int = 1,
    bf16: bool = False,
    bucket: int = 5000,
    moments: int = 2,
    data_types: dict | None = None,
    window: WindowSettings | None = None,
    **options,
):
    config = {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
        },
        "bf16": {"enabled": bf16},
        "data_types": data_types or {},
    }
    settings = communication_settings(config, world, accumulation)
    model = ModelFacts(PARAMETERS, uses=USES, window=window)
    return MemoryPlan(TRACE, model, settings, moments, **options).memory()


def test_stage_0_holds_everything_and_flattens_all_gradients_once():
    memory = _memory(0)
    states = 4 * 8000 + 2 * 4 * 7000
    assert memory.parts["master weights"] == 0  # fp32 weights are their own
    assert memory.phases["forward"] == states + 48_000
    assert memory.phases["backward"] == states + max(50_000, 16_000 + 40_000, 28_000 + 5_000)
    assert memory.phases["reduction"] == states + 2 * 28_000


def test_stage_2_shards_master_weights_and_moments_and_keeps_gradients_of_touching_parameters():
    memory = _memory(2)
    assert memory.parts["weights"] == 4 * 8000
    assert memory.parts["master weights"] == 4 * 3500
    assert memory.parts["moments"] == 2 * 4 * 3500
    assert memory.parts["gradients"] == 4 * 7000  # both parameters lie on both ranks
    # c waits in the bucket; b does not fit behind it, so c is reduced and the partition's gradients are laid out.
    base = 4 * 8000 + 3 * 4 * 3500
    assert memory.phases["backward"] == base + 4 * 5000 + max(50_000, 40_000, 4 * 7000 + 5_000)


def test_a_parameter_larger_than_a_bucket_waits_outside_it():
    memory = _memory(2, bucket=2000)
    base = 4 * 8000 + 3 * 4 * 3500
    assert memory.phases["backward"] == base + 4 * 2000 + max(50_000, 16_000 + 40_000, 28_000 + 12_000 + 5_000)


def test_stage_3_shards_weights_too_and_gathers_what_is_used():
    memory = _memory(3)
    assert memory.parts["weights"] == 4 * (3500 + 500)
    # What is needed again within the reuse distance stays whole: the two that come back, and once the frozen one.
    assert memory.phases["forward"] >= 48_000 + memory.parts["gathered weights"]
    assert 4 * 4000 <= memory.parts["gathered weights"] <= 2 * 4 * 8000


def test_half_precision_has_fp32_master_weights():
    whole, half = _memory(2), _memory(2, bf16=True)
    assert half.parts["weights"] == whole.parts["weights"] / 2
    assert half.parts["master weights"] == whole.parts["master weights"]
    assert half.parts["gradients"] == whole.parts["gradients"] / 2


def test_accumulated_gradients_are_there_in_forward_too():
    once, twice = _memory(0), _memory(0, accumulation=2)
    assert twice.phases["forward"] - once.phases["forward"] == 28_000


@pytest.mark.parametrize("stage", [2, 3])
def test_offloading_moves_optimizer_state_to_the_host(stage):
    here, away = _memory(stage), _memory(stage, offload="optimizer")
    assert away.parts["master weights"] == away.parts["moments"] == 0
    assert away.host >= here.parts["master weights"] + here.parts["moments"]
    assert away.peak < here.peak


def test_the_first_window_holds_a_partition_and_buckets_of_its_gradient_and_of_the_plain_one():
    memory = _memory(2, window=WindowSettings("signed", bucket_size=1000))
    # Two buckets of half of `bucket_size`; twice that where a rank receives while it sends.
    assert memory.parts["AGVM window"] == (4 * 3500 + 2 * 4 * 1000) + (4 * 3500 + 4 * 1000)
    assert memory.phases["backward"] == _memory(2).phases["backward"] + memory.parts["AGVM window"]
    assert _memory(2, window=WindowSettings("norms", bucket_size=1000)).parts["AGVM window"] == 4 * 3500 + 4 * 1000


@pytest.mark.parametrize(
    "stage, accumulation, world, kind, size",
    [
        # Beside the check: a partition in fp32, and buckets in bf16.
        (2, 1, 2, "signed", 16_000 + 2 * 3500 + 2 * 2 * 1000),
        (2, 2, 2, "signed", 16_000 + 2 * 3500),  # a copy of DeepSpeed's own sums
        (1, 2, 2, "signed", 16_000 + 2 * 3500 + 2 * 1000),  # the local sum is reduced once, and all ranks send
        (2, 1, 2, "squared", 16_000 + 4 * 3500 + 4 * 1000),
        (0, 1, 2, "signed", 16_000 + 2 * 3500 + 2 * 2 * 1000),
    ],
)
def test_a_window_in_half_precision(stage, accumulation, world, kind, size):
    memory = _memory(
        stage, accumulation=accumulation, world=world, bf16=True, window=WindowSettings(kind, bucket_size=1000)
    )
    assert memory.parts["AGVM window"] == size


@pytest.mark.parametrize("stage, size", [(0, 4 * 7000), (1, 4 * 3500), (3, 4 * 3500)])
def test_the_average_of_the_weights_is_one_more_share(stage, size):
    without, averaged = _memory(stage), _memory(stage, average=True)
    assert averaged.parts["average"] == size
    assert averaged.peak == without.peak + size
    if stage:
        away = _memory(stage, average=True, offload="optimizer")
        assert away.parts["average"] == 0
        assert away.host == _memory(stage, offload="optimizer").host + size


def test_gradients_added_up_in_fp32_are_whole_at_stage_1():
    usual, wide = _memory(1, bf16=True), _memory(1, bf16=True, data_types={"grad_accum_dtype": "fp32"})
    assert wide.parts["gradients"] == usual.parts["gradients"] + 4 * 7000 == (2 + 4) * 7000
    assert wide.parts["buckets"] == 0
    assert wide.phases["forward"] == usual.phases["forward"] + 4 * 7000
    assert wide.phases["backward"] == usual.phases["backward"] + 4 * 7000 - 2 * 5000
    temporaries = 3 * 4 * 2000  # the fp32 shard of the larger group, and twice as much for the rule
    assert wide.phases["reduction"] == wide.phases["step"] - temporaries + 4 * 7000


def test_offloading_takes_reduced_gradients_along():
    away = _memory(2, offload="optimizer")
    assert away.parts["gradients"] == 0
    assert away.parts["buckets"] == 4 * (5000 + 4000)  # and one parameter on its way
    assert away.phases["backward"] == 4 * 8000 + 4 * 9000 + 50_000


def test_more_ranks_never_need_more_memory_under_zero():
    for stage in (1, 2, 3):
        peaks = [_memory(stage, world=world).peak for world in (1, 2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    "kind, params, count",
    [
        ("AGVMAdamW", {}, 2),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("AGVMSGD", {}, 1),
        ("AGVMSGD", {"momentum": 0}, 0),
    ],
)
def test_moments_of_the_rules(kind, params, count):
    config = OptimizerConfig(type=kind, params={"lr": 0.1, **params})
    assert count_moments(config) == count


def test_the_peak_of_a_trace_is_its_highest_point():
    assert TRACE.peak == 50_000
    assert replace(TRACE, forward_peak=90_000).peak == 90_000
