"""SAM under ZeRO is plain SAM: two passes, one global norm, the weights restored to the bit."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from agvm_harness import (
    Case,
    PlainRun,
    Tiny,
    build,
    by_module,
    close,
    difference,
    full_weights,
    micro_batch,
    micro_gradients,
)
from resumed_run import BATCH_NORM
from tiny_run import difference as apart
from tiny_run import distance, train_tiny

STAGES = (0, 1, 2, 3)
RHO = 0.2


class PlainSam:
    """One process: climb by rho g / |g|, take all gradients there, and let the twin step from where it was."""

    def __init__(self, case, model):
        self.run, self.dtype = PlainRun(case, model), case.dtype

    def _load(self, weights):
        for module, own in by_module(self.run.model, lambda p: p.data).items():
            for weight, value in zip(own, weights[module]):
                weight.copy_(value)

    def step(self, step):
        run = self.run
        u = micro_gradients(run.model, step, run.total)
        g = {i: [sum(x[i][k] for x in u) / len(u) for k in range(len(u[0][i]))] for i in u[0]}
        norm = torch.cat([x.flatten() for xs in g.values() for x in xs]).double().norm()
        self._load({i: [w + RHO * x / norm for w, x in zip(run.masters[i], g[i])] for i in g})
        run.step(step)  # gradients at the model's weights, the step at the twin's own


def take_sam_step(engine, sam, case, step):
    def backward(k, batch):
        engine.backward(engine(*batch))
        return 1

    for k in range(case.accumulation):
        batch = micro_batch(step, k * dist.get_world_size() + dist.get_rank(), case.dtype)
        backward(k, sam.keep(batch))
        assert sam.step(backward) == (case.accumulation if k == case.accumulation - 1 else 0)


def follow_sam(case):
    from engine.optim.sam import SharpnessAware
    from engine.zero.layout import layout_of

    torch.manual_seed(1)
    model, case = Tiny(), replace(case, no_decay=False)
    plain = PlainSam(case, copy.deepcopy(model))
    engine, optimizer = build(case, model)
    sam = SharpnessAware(engine, optimizer, layout_of(engine), RHO)
    for step in range(1, case.steps + 1):
        take_sam_step(engine, sam, case, step)
        plain.step(step)
    assert engine.global_steps == case.steps and engine.micro_steps == case.steps * case.accumulation
    answer = difference(full_weights(engine), plain.run.weights())
    close(engine, optimizer)
    return answer


def follow_all_sam(cases):
    return [follow_sam(case) for case in cases]


def check(ranks, world, cases, tolerance, steps=10):
    cases = [replace(case, steps=steps) for case in cases]
    for case, found in zip(cases, ranks.run(follow_all_sam, world, cases, timeout=900)[0]):
        assert found <= tolerance, (world, case, found)


def test_sam_equals_a_plain_single_process_sam(ranks):
    base = {"agvm": {"tau": 1000}}
    for world in (2, 3):
        cases = [
            Case(s, 1 + (s + world) % 2, rule=("sgd", "adamw")[s % 2], clip_grad=0.3 * (s == 2), **base) for s in STAGES
        ]
        check(ranks, world, cases, 1e-6)
    check(ranks, 1, [Case(2, 2, rule="sgd", **base), Case(0, 2, rule="sgd", **base)], 1e-6)


def test_sam_over_rules_of_layers_and_over_agvm(ranks):
    check(
        ranks,
        2,
        [
            Case(1, 2, rule="lamb"),
            Case(3, 1, rule="lars"),
            Case(0, 1, rule="lamb"),
            Case(2, 2, rule="adamw"),
            Case(0, 2, rule="agvm_lamb"),
            Case(3, 2, rule="sgd", estimator="replicas"),
        ],
        1e-6,
    )


def test_sam_in_half_precision_and_with_offload(ranks):
    base = {"agvm": {"tau": 1000}}
    offload = {"offload_optimizer": {"device": "cpu"}}
    check(
        ranks,
        2,
        [
            Case(2, 2, rule="sgd", zero=offload, **base),
            Case(3, 1, rule="sgd", zero={**offload, "sub_group_size": 50}, **base),
        ],
        1e-6,
    )
    fp32_sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    # 2^-8 in every weight and gradient of either; the twin rounds at other places.
    check(
        ranks,
        2,
        [Case(s, 2, rule="sgd", precision="bf16", **base) for s in STAGES]
        + [Case(1, 2, rule="sgd", precision="bf16", config=fp32_sums, **base)],
        0.01,
    )
    check(ranks, 2, [Case(s, 1, rule="sgd", precision="fp16", **base) for s in (1, 2, 3)], 0.002)


def restored(case, poison):
    """Weights and loss scale before and after a step with learning rate 0, or one whose second pass overflows."""
    from engine.optim.sam import SharpnessAware
    from engine.zero.layout import layout_of

    torch.manual_seed(1)
    engine, optimizer = build(case, Tiny())
    layout = layout_of(engine)
    sam = SharpnessAware(engine, optimizer, layout, RHO)

    def working():
        """What a forward pass computes with; under ZeRO-3, this rank's share of it, without the padding, which
        DeepSpeed leaves as the memory was (a nan there is not equal to itself)."""
        return [share(p).detach().clone() for p in engine.module.parameters()]

    def share(p):
        if not hasattr(p, "ds_tensor"):
            return p
        begin = dist.get_rank() * p.ds_tensor.ds_numel
        return p.ds_tensor[: max(0, min(p.ds_tensor.ds_numel, p.ds_numel - begin))]

    before = full_weights(engine), working()
    scaler = layout.scaler()
    scale = [scaler.cur_scale, scaler.cur_iter] if poison else None
    moved = []

    def again(k, batch):
        moved.append(difference(full_weights(engine), before[0]))
        loss = engine(*batch)
        engine.backward(loss * (math.inf if poison else 1))
        return 0

    batch = micro_batch(1, dist.get_rank(), case.dtype)
    engine.backward(engine(*sam.keep(batch)))
    sam.step(again)
    same = all(torch.equal(a, b) for a, b in zip(before[0], full_weights(engine)))
    same_working = all(torch.equal(a, b) for a, b in zip(before[1], working()))
    applied = engine.was_step_applied()
    scales = (scale, [scaler.cur_scale, scaler.cur_iter]) if poison else None
    close(engine, optimizer)
    return moved, same, same_working, applied, scales


def test_weights_are_restored_to_the_bit(ranks):
    still = {"agvm": {"tau": 1000, "lr": 0.0}}
    for case in [Case(s, 1, rule="sgd", precision=p, **still) for s in STAGES for p in ("fp32", "bf16")]:
        for (moved,), same, same_working, applied, _ in ranks.run(restored, 2, case, False):
            assert moved > 1e-3 and same and same_working and applied, case


def test_an_overflow_in_the_second_pass_leaves_the_weights_where_they_were(ranks):
    config = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1}}
    for stage in (1, 2, 3):
        case = Case(stage, 1, rule="sgd", precision="fp16", config=config, agvm={"tau": 1000})
        for (moved,), same, same_working, applied, (before, after) in ranks.run(restored, 2, case, True):
            assert moved > 1e-3 and same and same_working and not applied
            assert after == [before[0] / 2, before[1] + 1]  # the climb is no step of the loss scale


SAM = {"optimizer": {"sam": {"rho": 0.05}}}


def test_runs_with_sam_are_alike_on_any_ranks_and_stage(ranks):
    runs = {
        (world, stage): ranks.run(train_tiny, world, {**SAM, "zero_optimization": {"stage": stage}})[0]
        for world, stage in ((1, 0), (2, 2), (2, 3))
    }
    plain = ranks.run(train_tiny, 1, {})[0]
    first = runs[1, 0]["weights"]
    assert distance(first, plain["weights"]) > 1e-6
    for run in runs.values():
        assert apart(first, run["weights"]) < 1e-5 and distance(first, run["weights"]) < 1e-7
        assert len(run["records"]) == 3


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_statistics_are_those_of_the_first_pass(ranks, stage):
    """Without a learning rate the weights stay, and so do the statistics of a run without SAM."""
    still = {
        **BATCH_NORM,
        "zero_optimization": {"stage": stage},
        "optimizer": {"params": {"lr": 0.0}, "sam": {"rho": 5.0}},
    }
    with_sam, without = (
        ranks.run(train_tiny, 2, changes)[0]["weights"]
        for changes in (still, {**still, "optimizer": {"params": {"lr": 0.0}}})
    )
    assert int(with_sam["backbone.bn1.num_batches_tracked"]) == 3 * 2
    for name in without:
        assert torch.equal(with_sam[name], without[name]), name
