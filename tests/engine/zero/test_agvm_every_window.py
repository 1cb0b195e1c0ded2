"""phi and mu equal brute force in every window, whatever the data does.

A head that some micro-batches skip (for the first time in a window), losses that are not finite (on one rank, on all,
in one micro-step of several), and weights that two modules share, for every stage, number of ranks and accumulation.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from agvm_harness import Case, PlainRun, Tiny, build, close, difference, full_weights, micro_batch, relative
from torch.utils.checkpoint import checkpoint

from engine.zero.complete_gradients import CompleteGradients
from engine.zero.whole_parameters import keep_whole

STEPS = 9


class Uneven(Tiny):
    """`head.box` is skipped by some micro-batches; the head uses the neck's weights too."""

    def __init__(self):
        super().__init__()
        self.gradients = None

    def forward(self, x, y, *, boxes=True, finite=True):
        touched = None if self.gradients is None else self.gradients.touch()
        z = self.backbone(torch.tanh(self.stem(x)).flatten(1))
        z = torch.tanh(self.neck(torch.tanh(z)))
        loss = (self.head["score"](self.neck(z)) - y[:, :1]).square().mean()
        if boxes:
            loss = loss + (self.head["box"](z) - y[:, 1:]).square().mean()
        if self.gradients is None:
            return loss if finite else loss * 0
        loss = loss if finite else loss * float("nan")
        return self.gradients.complete(loss, touched, counts=finite).loss


def mood(step, j, world):
    """What micro-batch j does: windows are steps 3, 6 and 9."""
    boxes = step < 3 or (step + j) % 3 != 0
    finite = not (
        (step == 5 and j == 0)
        or (step == 6 and j == 1)
        or (step == 9 and j < world)  # all ranks, in the first micro-step
    )
    return {"boxes": boxes, "finite": finite}


def both_halves_count(step, world, accumulation):
    """Without a finite micro-batch a half has no gradient, nor has the anchor in it: the window is discarded."""
    finite = [mood(step, j, world)["finite"] for j in range(world * accumulation)]
    middle = (len(finite) + 1) // 2
    return any(finite[:middle]) and any(finite[middle:])


def first_backward_has_gaps(step, j, world):
    """The very first backward is one whose gradients are delivered at once."""
    return {"boxes": step > 1 or j > 0, "finite": True}


def follow_uneven(case, mood=mood, prepare=None):
    torch.manual_seed(1)
    world, rank, model = dist.get_world_size(), dist.get_rank(), Uneven()
    if prepare is not None:
        prepare(model)
    plain = PlainRun(case, copy.deepcopy(model)) if rank == 0 else None
    model.gradients = CompleteGradients(model)
    engine, optimizer = build(case, model)
    keep_whole(engine, ["head.box"])
    model.gradients.observer = optimizer.observer
    capture, late, worst = optimizer._attachment.capture, 0, {"phi": 0.0, "mu": 0.0}
    for step in range(1, STEPS + 1):
        for k in range(case.accumulation):
            j = k * world + rank
            engine.backward(engine(*micro_batch(step, j), **mood(step, j, world)))
            model.gradients.release()
            if step > 3 and capture.companion is not None:  # in step 3 the gap is new
                late += sum(len(lane.late) for lane in capture.companion.all_lanes)
            engine.step()
        if plain is not None:
            plain.step(step, lambda m, x, y, step, j: m(x, y, **mood(step, j, world)))
            worst["phi"] = max(worst["phi"], relative(optimizer.phi, plain.twin.phi))
            worst["mu"] = max(worst["mu"], relative(optimizer.mu, plain.twin.mu))
    weights = full_weights(engine)
    if plain is not None:
        worst["weights"] = difference(weights, plain.weights())
    own = optimizer.agvm_state_dict()
    close(engine, optimizer)
    return worst, own, late


def follow_all_uneven(cases):
    return [follow_uneven(case) for case in cases]


# The smallest set with every pair of stage and N, of stage and K, and of N and K (but one rank and one micro-step).
def cases_for(world, exhaustive):
    if exhaustive:
        return [
            Case(stage, K, rule=rule, no_decay=False)
            for stage in range(4)
            for K in range(1, 5)
            if world * K > 1
            for rule in ("sgd", "adamw")
        ]
    rules = ("sgd", "adamw")
    K = [k if world * k > 1 else 2 for k in (1 + (stage + world) % 4 for stage in range(4))]
    return [Case(stage, K[stage], rule=rules[(stage + world) % 2], no_decay=False) for stage in range(4)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_window_equals_brute_force(ranks, world, exhaustive):
    cases = cases_for(world, exhaustive)
    for case, *answers in zip(cases, *ranks.run(follow_all_uneven, world, cases, timeout=900)):
        worst, own, _ = answers[0]
        assert all(answer[1] == own for answer in answers), "ranks disagree"
        windows = sum(both_halves_count(step, world, case.accumulation) for step in (3, 6, 9))
        assert (own["windows"], own["discarded"]) == (windows, 3 - windows), (case, own)
        assert max(worst.values()) <= 1e-6, (case, worst)
        assert sum(answer[2] for answer in answers) == 0, "gradients were held back as if they had come late"


def follow_a_first_gap(stages):
    return [
        follow_uneven(Case(stage, 2, rule="sgd", no_decay=False, agvm={"tau": 2}), first_backward_has_gaps)[:2]
        for stage in stages
    ]


def test_the_order_is_not_learnt_from_gradients_that_are_delivered_at_once(ranks):
    for worst, own in ranks.run(follow_a_first_gap, 2, (0, 1, 2, 3))[0]:
        assert own["windows"] == 4 and max(worst.values()) <= 1e-6, (worst, own)


class Recomputed(Tiny):
    """Two segments recomputed by reentrant checkpointing, which share the neck: its gradients come in two parts."""

    def forward(self, x, y):
        def body(x):
            return torch.tanh(self.neck(self.backbone(torch.tanh(self.stem(x)).flatten(1))))

        def heads(z):
            z = torch.tanh(self.neck(z))
            return self.head["score"](z), self.head["box"](z)

        z = checkpoint(body, x.requires_grad_(), use_reentrant=True)
        score, box = checkpoint(heads, z, use_reentrant=True)
        return (score - y[:, :1]).square().mean() + (box - y[:, 1:]).square().mean()


def follow_recomputed(cases):
    answers = []
    for case in cases:
        torch.manual_seed(1)
        model = Recomputed()
        plain = PlainRun(case, copy.deepcopy(model)) if dist.get_rank() == 0 else None
        engine, optimizer = build(case, model)
        worst, discarded = 0.0, 0
        for step in range(1, 7):
            for k in range(case.accumulation):
                engine.backward(engine(*micro_batch(step, k * dist.get_world_size() + dist.get_rank())))
                engine.step()
            discarded = optimizer.modulator.discarded
            if plain is not None:
                plain.step(step)
                worst = max(worst, relative(optimizer.phi, plain.twin.phi), relative(optimizer.mu, plain.twin.mu))
        answers.append((worst, optimizer.modulator.windows, discarded))
        close(engine, optimizer)
    return answers


def test_reentrant_recomputation_in_parts(ranks):
    # ZeRO-2 and 3 of DeepSpeed 0.19.8 refuse a gradient that comes in parts.
    cases = [Case(stage, K, rule="sgd", no_decay=False) for stage in (0, 1) for K in (1, 2, 3)]
    for case, (worst, windows, discarded) in zip(cases, ranks.run(follow_recomputed, 2, cases)[0]):
        assert (windows, discarded) == (2, 0) and worst <= 1e-6, (case, worst)


def deliver_twice(stages):
    """A gradient that goes through the hooks twice in one micro-step, on one rank."""
    answers = []
    for stage in stages:
        torch.manual_seed(1)
        case = Case(stage, 2, rule="sgd")
        engine, optimizer = build(case, Tiny())
        capture = optimizer._attachment.capture
        for step in range(1, 10):
            for k in range(2):
                engine.backward(engine(*micro_batch(step, k * 2 + dist.get_rank())))
                engine.step()
                if step == 6 and k == 0 and dist.get_rank() == 1:
                    # The next micro-step begins with a stray gradient.
                    capture._take(3, torch.zeros_like(capture.layout.params[3]))
        answers.append((optimizer.agvm_state_dict()["windows"], optimizer.agvm_state_dict()["discarded"]))
        close(engine, optimizer)
    return answers


def test_a_gradient_counted_twice_is_noticed_and_the_window_not_used(ranks):
    assert ranks.run(deliver_twice, 2, (0, 1, 2))[0] == [(2, 1)] * 3
