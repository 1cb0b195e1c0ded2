"""Predicted collectives are those of real ranks, operation by operation, and those worked out by hand."""

import inspect
from collections import Counter

import pytest
from tiny_run import merged

from engine.errors import ConfigError
from engine.optim.agvm import BUCKET_SIZE
from engine.planning.comparison import measured_and_predicted
from engine.planning.model_facts import ModelFacts, Parameter, SyncedNorm, WindowSettings, window_settings
from engine.planning.traffic import sent_bytes, step_calls, step_traffic
from engine.zero.recording import Use
from engine.zero.settings import communication_settings

SGD, ADAMW, PLAIN = "AGVMSGD", "AGVMAdamW", "SGD"
SMALL_BUCKETS = {"reduce_bucket_size": 20000}
# Parameters above 2000 elements travel, a little ahead of their use, and are let go where the way back is long.
RESTLESS = {
    "stage3_param_persistence_threshold": 2000,
    "stage3_prefetch_bucket_size": 20000,
    "stage3_max_reuse_distance": 100000,
    "reduce_bucket_size": 30000,
    "sub_group_size": 20000,
}


def case(world, stage, optimizer, *, dtype="fp32", K=1, estimator="halves", zero=(), **changes):
    agvm = (
        {"tau": 2, "start_step": 0, "bucket_size": 20000, "estimator": estimator}
        if optimizer.startswith("AGVM")
        else {}
    )
    half = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return world, merged(
        {
            "train_batch_size": world * K,
            "zero_optimization": {"stage": stage, **dict(zero)},
            **half,
            "optimizer": {"type": optimizer, "params": {"lr": 1e-3, **agvm}},
            "schedule": {"steps": 4, "warmup_steps": 0, "decay": "constant"},
            **changes,
        }
    )


CASES = {
    "stage 0": case(2, 0, SGD, gradient_clipping=1.0),
    "stage 0, bf16, two micro-steps": case(2, 0, ADAMW, dtype="bf16", K=2),
    "stage 1, bf16": case(2, 1, ADAMW, dtype="bf16"),
    "stage 1, odd ranks, two micro-steps": case(3, 1, ADAMW, K=2, zero=SMALL_BUCKETS),
    "stage 1, bf16 with fp32 sums": case(2, 1, ADAMW, dtype="bf16", data_types={"grad_accum_dtype": "fp32"}),
    "stage 2": case(2, 2, SGD, K=2, estimator="replicas"),
    "stage 2, bf16, odd ranks": case(3, 2, ADAMW, dtype="bf16", estimator="replicas", zero=SMALL_BUCKETS),
    "stage 2, to the owners": case(4, 2, PLAIN, zero={**SMALL_BUCKETS, "use_multi_rank_bucket_allreduce": False}),
    "stage 2, loose gradients": case(2, 2, PLAIN, zero={**SMALL_BUCKETS, "contiguous_gradients": False}),
    "stage 3": case(2, 3, ADAMW, K=2),
    "stage 3, partly frozen": case(2, 3, PLAIN, detector={"frozen": ["backbone.conv1", "backbone.layer1"]}),
    "stage 3, bf16, odd ranks, restless": case(3, 3, ADAMW, dtype="bf16", K=2, zero=RESTLESS),
    "norms of layers": case(2, 2, "LAMB", gradient_clipping=1.0),
    "norms of layers, AGVM": case(2, 3, "AGVMLARS", gradient_clipping=1.0),
    "synced batch norm, recomputed": case(
        2,
        2,
        PLAIN,
        detector={
            "sync_bn": True,
            "checkpoint_activations": ["backbone"],
            "options": {
                "backbone.base_channels": 8,
                "backbone.norm_cfg": {"type": "BN"},
                "neck.in_channels": [8, 16, 32, 64],
                "neck.out_channels": 16,
                "bbox_head.in_channels": 16,
                "bbox_head.feat_channels": 16,
                "bbox_head.stacked_convs": 1,
                "bbox_head.norm_cfg.num_groups": 4,
            },
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_measured_operation_by_operation(ranks, name):
    world, content = CASES[name]
    for steps in ranks.run(measured_and_predicted, world, content, True):
        # The first step agrees on names; ZeRO-3 has learnt the model's order after the second.
        first = 2 if content["zero_optimization"]["stage"] == 3 and content["train_batch_size"] == world else 1
        for number, step in list(enumerate(steps, start=1))[first:]:
            assert step.measured == step.predicted, number
            assert step.window == (content["optimizer"]["type"].startswith("AGVM") and number % 2 == 0)


def test_the_order_of_gradients_need_not_be_known_for_the_bytes(ranks):
    world, content = CASES["stage 3, bf16, odd ranks, restless"]
    content = merged({"zero_optimization": {"stage3_max_reuse_distance": 10**9}}, content)
    for step in ranks.run(measured_and_predicted, world, content)[0][1:]:
        assert len(set(step.payload())) == 1


MODEL = [
    Parameter("a", 10, "backbone", 0),
    Parameter("b", 3, "backbone", 1),
    Parameter("c", 7, "head", 2),
    Parameter("frozen", 100, "backbone", None),
]
# One message: a finite loss, flags of three parameters, four notices, two losses.
LOOP = Counter({("all_reduce", 4 * 10): 1})


# Each parameter is used once, in order, and on the way back.
USES = [Use(i, (i,), fetch) for i in (0, 1, 2, 3, 3, 2, 1, 0) for fetch in (True, False)]


def calls(deepspeed, world=4, K=1, backend="nccl", **facts):
    settings = communication_settings(deepspeed, world, K)
    traffic = step_traffic(ModelFacts(MODEL, USES, **facts), settings, losses=2, backend=backend)
    return step_calls(traffic, K, window=True, first=False)


def zero(stage, **settings):
    return {"zero_optimization": {"stage": stage, **settings}}


def test_a_step_by_hand():
    bf16 = {"bf16": {"enabled": True}}
    assert calls(zero(0)) == LOOP + Counter({("all_reduce", 80): 1})
    assert calls({**zero(0), "gradient_clipping": 1.0}) == LOOP + Counter({("all_reduce", 80): 1, ("all_reduce", 4): 1})
    # Groups of 10, 3 and 7 elements padded to 16, 8 and 8; one overflow flag, a norm for each group.
    shards = Counter({("all_gather", 32): 1, ("all_gather", 16): 2, ("all_reduce", 1): 1, ("all_reduce", 4): 3})
    assert calls({**zero(2), **bf16}) == LOOP + shards + Counter({("all_reduce", 40): 1})
    # Two micro-steps: gradients and the message twice at stage 2, gradients once at stage 1.
    twice = LOOP
    assert calls({**zero(2), **bf16}, K=2) == LOOP + twice + shards + Counter({("all_reduce", 40): 2})
    assert calls({**zero(1), **bf16}, K=2) == LOOP + twice + shards + Counter({("all_reduce", 40): 1})
    # Chunks of 3, 1 and 2, all small enough to stay whole, as is the frozen one: gathered after the step, one by one;
    # fp64 norms.
    assert calls({**zero(3), **bf16}) == LOOP + Counter(
        {
            ("reduce_scatter", 2 * 4 * 6): 1,
            ("all_gather", 24): 1,
            ("all_gather", 8): 1,
            ("all_gather", 16): 1,
            ("all_gather", 200): 1,
            ("all_reduce", 8): 3,
        }
    )


def test_zero_3_gathers_what_does_not_stay():
    away = zero(3, stage3_param_persistence_threshold=0)
    reduced = LOOP + Counter({("reduce_scatter", 4 * 4 * 6): 1, ("all_reduce", 8): 3})
    # The frozen one (100 elements, chunks of 25) too; ahead of time, so that the rest of the model is one call.
    assert calls(away) == reduced + Counter({("all_gather", 4 * 12): 1, ("all_gather", 4 * (4 + 8 + 100)): 1})
    # Without prefetching one by one, and twice where nothing is kept for the way back.
    lone = {4 * 12: 1, 4 * 4: 1, 4 * 8: 1, 4 * 100: 1}
    one_by_one = {**away["zero_optimization"], "stage3_prefetch_bucket_size": 0}
    assert calls({"zero_optimization": one_by_one}) == reduced + Counter({("all_gather", n): 1 for n in lone})
    restless = calls({"zero_optimization": {**one_by_one, "stage3_max_reuse_distance": 0}})
    assert restless == reduced + Counter({("all_gather", n): 2 for n in lone})


@pytest.mark.parametrize(
    "stage, backend, expected",
    [
        # The first two of four ranks send all 20 elements, reduced in two slices, which then go to their owners.
        (2, "nccl", {("reduce_scatter", 4 * 20): 1, ("all_to_all", 4 * 20): 1}),
        # Chunks: N rows of 3 + 1 + 2 elements.
        (3, "nccl", {("reduce_scatter", 4 * 24): 1, ("all_to_all", 4 * 24): 1}),
        (3, "gloo", {("reduce", 4 * 12): 2, ("all_to_all", 4 * 24): 1}),
    ],
)
def test_a_window_of_one_micro_step_by_hand(stage, backend, expected):
    plain, window = (calls(zero(stage), window=w, backend=backend) for w in (None, WindowSettings("signed")))
    assert window - plain == Counter({**expected, ("all_reduce", 8 * 15): 1, ("all_reduce", 8 * 6): 1})


def second_gradients(world, stage, K, kind="signed", size=BUCKET_SIZE):
    settings = communication_settings(zero(stage), world, K)
    traffic = step_traffic(ModelFacts(MODEL, window=WindowSettings(kind, size)), settings)
    return [c for c in traffic if c.purpose == "second gradient"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_halves_of_micro_steps_cost_no_bytes_where_deepspeed_reduces_each(world):
    for K in (2, 4):
        assert second_gradients(world, 2, K) == second_gradients(world, 3, K) == []
    # A local sum is reduced once, whatever K is.
    for K in (2, 3, 4):
        assert sum(c.calls * c.bytes for c in second_gradients(world, 1, K)) == 80


def test_an_odd_number_of_micro_steps_sends_the_middle_one_of_the_first_ranks():
    assert [(c.op, c.bytes, c.members) for c in second_gradients(4, 2, 3)] == [
        ("reduce_scatter", 80, range(2)),
        ("all_to_all", 80, None),
    ]


def test_with_one_micro_step_every_rank_sends_half_of_the_model():
    # Buckets of 4 elements; the first two ranks send every other one of them, the last two the rest.
    sent = second_gradients(4, 2, 1, size=8)
    assert {c.members: c.calls for c in sent if c.op == "reduce_scatter"} == {range(2): 3, range(2, 4): 2}
    assert sum(c.calls * c.sent(4) for c in sent) == 80 * (1 / 4 + 3 / 16)  # of 60 where all ranks send


@pytest.mark.parametrize("world", [8, 64, 480, 768])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bucket_is_one_call_or_two_on_any_number_of_ranks(stage, world):
    """Some 45 million elements in 200 parameters, as Faster R-CNN R50 has them."""
    sizes = [(64, 2048, 36864, 589824)[i % 4] + 7 * i for i in range(200)]
    model = [Parameter(f"p{i}", n, "backbone", i % 2) for i, n in enumerate(sizes)]
    buckets = sum(sizes) / (BUCKET_SIZE // 2)
    for kind, K in (("signed", 1), ("signed", 3), ("squared", 1)):
        settings = communication_settings(zero(stage), world, K)
        facts = ModelFacts(model, window=WindowSettings(kind))
        traffic = [c for c in step_traffic(facts, settings) if c.purpose == "second gradient"]
        for rank in (0, world - 1):
            counted = step_calls(traffic, K, window=True, rank=rank)
            assert 0 < counted.total() <= 2 * (buckets + 1.05), (kind, K, counted)


def test_synced_norms_count_forward_and_backward():
    norms = [SyncedNorm(5, forward=2)]
    assert calls(zero(0), norms=norms) - calls(zero(0)) == Counter({("all_reduce", 8 * 11): 2, ("all_reduce", 40): 1})


def test_what_a_ring_sends():
    assert sent_bytes("all_reduce", 100, 4) == 150 and sent_bytes("reduce_scatter", 100, 4) == 75
    assert sent_bytes("all_gather", 100, 1) == sent_bytes("barrier", 100, 4) == 0
    settings = communication_settings(zero(0), 4, 1)
    traffic = step_traffic(ModelFacts(MODEL), settings)
    assert sum(c.times(1) * sent_bytes(c.op, c.bytes, 4) for c in traffic) == 1.5 * (80 + 4 * 8)
    assert step_traffic(ModelFacts(MODEL), communication_settings(zero(2), 1, 1)) == []


def test_settings_have_the_defaults_of_those_who_own_them():
    from engine.optim import AGVMSGD

    assert inspect.signature(AGVMSGD.attach).parameters["bucket_size"].default == BUCKET_SIZE
    assert window_settings("AdamW", {}) is None and window_settings(ADAMW, {}).kind == "signed"
    assert window_settings(SGD, {"estimator": "replicas", "bucket_size": 9}) == WindowSettings("norms", 9)
    assert window_settings(ADAMW, {"estimator": "replicas"}).kind == "squared"


@pytest.mark.parametrize(
    "deepspeed, words",
    [
        (zero(2, reduce_bucket_size=-1), 'does not accept "reduce_bucket_size" in zero_optimization'),
        (zero(3, zero_quantized_weights=True), "with zero_optimization.zero_quantized_weights is not known"),
        ({**zero(2), "torch_autocast": {"enabled": True}}, "with torch_autocast is not known"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(deepspeed, words):
    with pytest.raises(ConfigError, match=words):
        communication_settings(deepspeed, 2, 1)
