"""What goes wrong in real runs: NaN on one rank, modules and heads without gradient, gradients out of order."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from agvm_harness import Case, PlainRun, Tiny, build, by_module, close, follow, relative, take_step
from torch import nn

from engine.optim.reference import ReferenceSGD


def nan_loss(bad_step, bad_rank):
    def loss(model, x, y, step, j):
        poison = math.nan if step == bad_step and dist.get_rank() == bad_rank else 1.0
        return model(x, y) * poison

    return loss


def inject_nan(stage, bad_step):
    """A NaN on the last rank at one step: what mu and phi are before and after, and how far from a twin that skips."""
    torch.manual_seed(1)
    case, model = Case(stage, 2, rule="sgd", no_decay=False), Tiny()
    plain = PlainRun(case, copy.deepcopy(model)) if dist.get_rank() == 0 else None
    engine, optimizer = build(case, model)
    loss, worst, kept = nan_loss(bad_step, dist.get_world_size() - 1), 0.0, []
    for step in range(1, 13):
        before = (optimizer.mu, optimizer.phi)
        take_step(engine, case, step, loss=loss)
        if step == bad_step:
            kept.append(before == (optimizer.mu, optimizer.phi))
            if stage == 0:
                break  # DeepSpeed checks nothing at stage 0 in fp32: the weights are lost
            if plain is not None:
                plain.twin.t += 1  # DeepSpeed skips the step, and it counts
        elif plain is not None:
            plain.step(step)
            worst = max(worst, relative(optimizer.phi, plain.twin.phi), relative(optimizer.mu, plain.twin.mu))
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return kept, worst, state


def inject_nans(cases):
    return [inject_nan(*case) for case in cases]


def test_nan_on_one_rank_discards_the_window_on_all_and_leaves_mu(ranks):
    cases = [(0, 6), (1, 6), (2, 6), (2, 3), (3, 6), (1, 7), (2, 7), (3, 7)]
    for (stage, bad), *answers in zip(cases, *ranks.run(inject_nans, 2, cases)):
        kept, worst, state = answers[0]
        assert kept == [True] and worst <= 1e-6
        assert all(answer[2] == state for answer in answers)
        in_window = bad % 3 == 0
        assert state["discarded"] == int(in_window)
        assert state["windows"] == (4 - in_window if stage else 1)


def overflow(stage):
    """fp16 with a loss scale far too large: steps are skipped until it has come down."""
    torch.manual_seed(1)
    case = Case(
        stage,
        1,
        precision="fp16",
        config={"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 1000}},
        agvm={"tau": 1},
    )
    engine, optimizer = build(case, Tiny())
    states = []
    for step in range(1, 16):
        take_step(engine, case, step)
        states.append((engine.skipped_steps, optimizer.agvm_state_dict()))
    close(engine, optimizer)
    return states


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_fp16_overflow_discards_the_window(ranks, stage):
    states = ranks.run(overflow, 2, stage)[0]
    skipped, last = states[-1]
    assert 0 < skipped < 15
    assert (last["discarded"], last["windows"]) == (skipped, 15 - skipped)
    for _, state in states:
        if state["windows"] == 0:
            assert set(state["mu"].values()) == {1.0} and state["phi"] == {}


class Gaps:
    """A loss that leaves out parts of the head at some steps, on some micro-batches."""

    def __init__(self, *, boxes=(), head=(), some_ranks=(), first_micro_step=()):
        self.boxes, self.head, self.some_ranks, self.first = boxes, head, some_ranks, first_micro_step

    def __call__(self, model, x, y, step, j):
        if step in self.head:
            module = getattr(model, "module", model)
            return module.neck(module.backbone(torch.tanh(module.stem(x)).flatten(1))).square().mean()
        missing = step in self.boxes or (step in self.some_ranks and j % 2 == 1)
        missing |= step in self.first and j < dist.get_world_size()
        return model(x, y, boxes=not missing)


def gap_runs(cases, accumulation=2):
    return [
        follow(Case(stage, accumulation, rule=rule, steps=steps), loss=Gaps(**gaps))
        for stage, rule, steps, gaps in cases
    ]


def test_a_parameter_without_gradient_counts_as_none(ranks):
    """Missing on all ranks at a window: ZeRO-3 still holds the previous gradient there, which must not count."""
    cases = [(stage, rule, 6, {"boxes": (6,)}) for stage in (0, 1, 2, 3) for rule in ("sgd", "adamw")]
    for case, answer in zip(cases, ranks.run(gap_runs, 2, cases)[0]):
        assert answer["own"]["windows"] == 2 and max(answer["phi"], answer["mu"]) <= 1e-6, (case, answer)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_a_gradient_that_only_comes_after_the_first_micro_step(ranks, accumulation):
    """ZeRO-3 adds it to that of the step before (DeepSpeed 0.19.8), so that there the window cannot be used."""
    cases = [(stage, "sgd", 6, {"first_micro_step": (6,)}) for stage in (0, 1, 2)]
    for case, answer in zip(cases, ranks.run(gap_runs, 2, cases, accumulation)[0]):
        assert answer["own"]["windows"] == 2 and max(answer["phi"], answer["mu"]) <= 1e-6, (case, answer)
    answer = ranks.run(stale_run, 2, accumulation)[0]
    assert (answer["windows"], answer["discarded"]) == (1, 1)


def stale_run(accumulation):
    torch.manual_seed(1)
    case = Case(3, accumulation, rule="sgd")
    engine, optimizer = build(case, Tiny())
    for step in range(1, 7):
        take_step(engine, case, step, loss=Gaps(first_micro_step=(6,)))
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return state


def thaw(cases):
    """A layer is frozen from the start and trained from step 4 on; or in bf16 with sums in fp32, the head is frozen."""
    answers = []
    for rule, stage, precision in cases:
        torch.manual_seed(1)
        sums = {"data_types": {"grad_accum_dtype": "fp32"}} if precision == "bf16" else {}
        case = Case(stage, 2, rule=rule, precision=precision, config=sums)
        engine, optimizer = build(case, Tiny())
        for step in range(1, 10):
            if precision == "bf16":
                engine.module.head.requires_grad_(step < 4)
            else:
                engine.module.backbone[3].requires_grad_(step > 4)
            take_step(engine, case, step)
        answers.append(optimizer.agvm_state_dict() if hasattr(optimizer, "modulator") else {"windows": 3})
        close(engine, optimizer)
    return answers


def test_layers_frozen_and_trained_in_the_middle_of_a_run(ranks):
    """At stage 0 a parameter has no state before its first step, and others of its group have."""
    cases = [("sgd", 0, "fp32"), ("lars", 0, "fp32"), ("adamw", 2, "bf16")]
    assert [answer["windows"] for answer in ranks.run(thaw, 2, cases)[0]] == [3, 3, 3]


def test_a_gradient_missing_on_some_ranks_counts_as_zero(ranks):
    cases = [(0, "adamw", 9, {"some_ranks": (3, 6, 8)}), (0, "sgd", 9, {"some_ranks": (6,)})]
    for world in (2, 3):
        for case, answer in zip(cases, ranks.run(gap_runs, world, cases)[0]):
            assert answer["own"]["windows"] == 3 and max(answer["phi"], answer["mu"]) <= 1e-6, (case, answer)


def lose_the_head(stage, how):
    """The head gets no gradient from step 5 to 9 (`gap`), or is frozen from step 5 (`freeze`)."""
    torch.manual_seed(1)
    case = Case(stage, 2, rule="sgd")
    engine, optimizer = build(case, Tiny())
    history = []
    for step in range(1, 13):
        if how == "freeze" and step == 5:
            engine.module.head.requires_grad_(False)
        take_step(engine, case, step, loss=Gaps(head=range(5, 10)) if how == "gap" else None)
        history.append((optimizer.mu, optimizer.phi))
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return history, state


def lose_heads(cases):
    return [lose_the_head(*case) for case in cases]


def test_a_module_frozen_or_without_gradient_for_several_steps_keeps_its_mu(ranks):
    cases = [(stage, how) for stage in (0, 1, 2, 3) for how in ("gap", "freeze")]
    for (_, how), (history, state) in zip(cases, ranks.run(lose_heads, 2, cases)[0]):
        assert (state["windows"], state["discarded"]) == (4, 0)
        (mu3, phi3), (mu6, phi6), (mu9, phi9), (mu12, phi12) = history[2::3]
        assert "head" in phi3 and "head" not in phi6 and "head" not in phi9 and {"backbone", "neck"} == set(phi9)
        assert mu3["head"] == mu6["head"] == mu9["head"] and mu6["neck"] != mu9["neck"]
        assert ("head" in phi12) == (how == "gap")


def lose_the_anchor():
    torch.manual_seed(1)
    case = Case(2, 2, rule="sgd", agvm={"anchor": "head"})
    engine, optimizer = build(case, Tiny())
    history = []
    for step in range(1, 10):
        take_step(engine, case, step, loss=Gaps(head=(6,)))
        history.append((optimizer.mu, optimizer.phi))
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return history, state


def test_a_window_whose_anchor_has_no_gradient_is_discarded(ranks):
    history, state = ranks.run(lose_the_anchor, 2)[0]
    assert (state["windows"], state["discarded"]) == (2, 1)
    assert history[5] == history[2] and history[8] != history[2]
    assert history[8][0]["head"] == 1.0


class Branches(nn.Module):
    """Branches whose gradients come in an order that depends on the step and the rank."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(7, 5) for _ in range(6))
        self.neck = nn.Linear(5, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x, y, order):
        z = sum(self.backbone[i](x) for i in order)
        return (self.head(torch.tanh(self.neck(z))) - y).square().mean()


def shuffled(step, j):
    generator = torch.Generator().manual_seed(step * 100 + j)
    order = torch.randperm(6, generator=generator).tolist()
    return order, torch.randn(3, 7, generator=generator), torch.randn(3, 2, generator=generator)


def train_out_of_order(estimator):
    torch.manual_seed(1)
    model = Branches()
    case = Case(0, 2, rule="sgd", estimator=estimator, bucket_size=45, no_decay=False)
    twin_model = copy.deepcopy(model)
    twin = ReferenceSGD(by_module(twin_model, lambda p: p.data), **case.options())
    engine, optimizer = build(case, model)
    capture, late = optimizer._attachment.capture, 0
    finish = capture.finish

    def counting_finish(*args):
        nonlocal late
        late += sum(len(lane.late) for lane in capture.companion.lanes)
        return finish(*args)

    capture.finish = counting_finish
    worst = 0.0
    for step in range(1, 10):
        for k in range(2):
            order, x, y = shuffled(step, k * dist.get_world_size() + dist.get_rank())
            engine.backward(engine(x, y, order))
            engine.step()
        u = []
        for j in range(2 * dist.get_world_size()):
            order, x, y = shuffled(step, j)
            twin_model.zero_grad()
            twin_model(x, y, order).backward()
            u.append(by_module(twin_model, lambda p: p.grad.clone()))
        twin.step(u)
        worst = max(worst, relative(optimizer.phi, twin.phi), relative(optimizer.mu, twin.mu))
    state = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return worst, late, state["windows"]


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_in_another_order_on_every_rank_are_not_lost(ranks, world):
    answers = ranks.run(train_out_of_order, world, "halves")
    assert all(worst <= 1e-6 and windows == 3 for worst, _, windows in answers)
    assert sum(late for _, late, _ in answers) > 0, "this order was to come too late for its bucket"


def frozen_and_unused(stage):
    def prepare(model):
        model.head["unused"] = nn.Linear(3, 3)
        model.stem.requires_grad_(False)
        model.frozen = ("stem",)

    # Without weight decay, which would move the unused weights under DeepSpeed and not in the twin.
    return follow(Case(stage, 2, rule="adamw", steps=12, agvm={"weight_decay": 0.0}), prepare=prepare)


def all_frozen_and_unused(stages):
    return [frozen_and_unused(stage) for stage in stages]


def test_frozen_and_unused_parameters(ranks):
    for answer in ranks.run(all_frozen_and_unused, 2, (0, 1, 2, 3))[0]:
        assert answer["own"]["windows"] == 4 and max(answer["phi"], answer["mu"], answer["weights"]) <= 1e-6
