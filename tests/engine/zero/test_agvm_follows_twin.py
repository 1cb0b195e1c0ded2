"""The sharded optimizers follow the plain twin: every stage, world size, accumulation, precision and option.

Figures are relative differences after (weights) or at any of (phi, mu) the steps, with a window every third of
9 steps (30 with --exhaustive for stages, world sizes and accumulation).
"""

from dataclasses import replace

import pytest
from agvm_harness import Case, follow_all

STAGES = (0, 1, 2, 3)


def check(ranks, world, cases, *, phi, mu, weights, steps=9):
    cases = [replace(case, steps=steps) for case in cases]
    for case, *answers in zip(cases, *ranks.run(follow_all, world, cases, timeout=900)):
        first = answers[0]
        assert all(answer["own"] == first["own"] for answer in answers), "ranks disagree"
        windows = [t for t in range(3, case.steps + 1, 3) if t > case.agvm.get("start_step", 0)]
        assert (first["own"]["windows"], first["own"]["discarded"]) == (len(windows), 0)
        assert first["phi"] <= phi and first["mu"] <= mu and first["weights"] <= weights, (case, first)


# Every pair of stage and N, every K, both rules; both estimators and clipping by turns.
MATRIX = {
    1: [Case(s, 2 + (s + r) % 2, rule=rule) for s in STAGES for r, rule in enumerate(("sgd", "adamw"))],
    2: [
        Case(s, 1 + (s + 2 * r) % 3, rule=rule, clip_grad=0.3 if s + r == 2 else 0.0)
        for s in STAGES
        for r, rule in enumerate(("sgd", "adamw"))
    ],
    3: [
        Case(s, 1 + (s + r) % 3, rule=rule, bucket_size=200) for s in STAGES for r, rule in enumerate(("adamw", "sgd"))
    ],
    4: [
        Case(s, 1 + s % 3, rule=rule, bucket_size=1000)
        for s in STAGES
        for rule in (("adamw", "sgd") if s == 2 else ("adamw",))
    ],
}


@pytest.mark.parametrize("world", MATRIX)
def test_stages_world_sizes_and_accumulation_in_fp32(ranks, world, exhaustive):
    steps = 30 if exhaustive else 9
    check(ranks, world, MATRIX[world], phi=1e-6, mu=1e-6, weights=1e-6, steps=steps)


def test_clipping_at_every_stage(ranks):
    check(ranks, 2, [Case(s, 2, rule="adamw", clip_grad=0.3) for s in STAGES], phi=1e-6, mu=1e-6, weights=1e-6)


def test_replicas_estimator(ranks):
    cases = [
        Case(0, 1, rule="adamw", estimator="replicas"),
        Case(1, 2, rule="sgd", estimator="replicas"),
        Case(2, 2, rule="adamw", estimator="replicas", clip_grad=0.3),
        Case(3, 3, rule="sgd", estimator="replicas"),
        Case(3, 1, rule="adamw", estimator="replicas"),
    ]
    check(ranks, 3, cases, phi=1e-6, mu=1e-6, weights=1e-6)


def test_deepspeed_options_in_fp32(ranks):
    cases = [
        Case(1, 2, zero={"round_robin_gradients": True}),
        Case(2, 2, zero={"round_robin_gradients": True, "contiguous_gradients": False}),
        Case(1, 2, zero={"overlap_comm": True}),
        Case(2, 3, zero={"overlap_comm": True, "reduce_scatter": False}),
        Case(2, 2, zero={"parameter_alignment": True}),
        Case(3, 2, zero={"contiguous_gradients": False, "sub_group_size": 50}),
        Case(3, 2, zero={"overlap_comm": True, "sub_group_size": 50, "stage3_param_persistence_threshold": 100}),
        *(Case(s, 2, zero={"offload_optimizer": {"device": "cpu"}}, clip_grad=0.3) for s in (1, 2, 3)),
    ]
    check(ranks, 2, cases, phi=1e-6, mu=1e-6, weights=1e-6)


def test_algorithm_one_to_the_letter_and_start_step(ranks):
    cases = [
        Case(2, 2, rule="sgd", agvm={"momentum": 0.9, "dampening": 0.9}),
        Case(0, 2, rule="sgd", agvm={"start_step": 4, "clip": (0.9, 1.1), "ratio_eps": 1e-3}),
    ]
    check(ranks, 1, cases, phi=1e-6, mu=1e-6, weights=1e-6)


FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}


def test_bf16(ranks):
    """The twin computes the same bf16 micro-gradients; DeepSpeed rounds their sums to bf16 (2^-8), it does not."""
    cases = [
        Case(0, 2, rule="sgd", precision="bf16", agvm={"weight_decay": 0.0}),
        Case(1, 2, precision="bf16", config=FP32_SUMS),
        Case(1, 1, precision="bf16"),
        Case(2, 2, precision="bf16"),
        Case(2, 2, precision="bf16", config=FP32_SUMS),
        Case(3, 2, precision="bf16", clip_grad=0.3),
        Case(3, 2, precision="bf16", config=FP32_SUMS),
    ]
    check(ranks, 2, cases, phi=0.05, mu=0.01, weights=0.01)


def test_fp16_with_a_loss_scale(ranks):
    cases = [Case(s, 2, precision="fp16", clip_grad=0.3 * (s > 1)) for s in (1, 2, 3)]
    check(ranks, 2, cases, phi=0.01, mu=0.002, weights=0.002)
