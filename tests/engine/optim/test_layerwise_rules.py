"""LARS, LAMB and PMD-LAMB on whole parameters, without DeepSpeed, and what they refuse."""

import pytest
import torch

import engine.optim.lamb
import engine.optim.lars
from engine.config.schema import OptimizerConfig
from engine.errors import ConfigError
from engine.optim import AGVMLAMB, AGVMLARS, LAMB, LARS, PMDLAMB
from engine.optim.lamb import _weight
from engine.optim.registry import build_optimizer

SHAPES = ((7,), (5, 4), (3, 2, 3, 3), (1,))


def train(make, steps=30):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(*shape)) for shape in SHAPES]
    weights[2] = torch.nn.Parameter(weights[2].detach().to(memory_format=torch.channels_last))
    flat = [w for w in weights if w.dim() == 1]
    optimizer = make(
        [
            {"params": flat, "weight_decay": 0.0, "module": "backbone"},
            {"params": [w for w in weights if w.dim() > 1], "module": "head"},
        ]
    )
    for _ in range(steps):
        for w in weights:
            w.grad = torch.randn(w.shape)
        optimizer.step()
    return torch.cat([w.detach().flatten() for w in weights]), optimizer


@pytest.mark.parametrize("batch", [3, 1 << 22])
@pytest.mark.parametrize(
    "ours, theirs, options, their_options",
    [
        (
            LARS,
            "Lars",
            dict(lr=0.5, momentum=0.8, weight_decay=0.03, norm="sum_of", trust_coefficient=0.02),
            dict(lr=0.5, momentum=0.8, weight_decay=0.03, trust_coeff=0.02),
        ),
        (
            LARS,
            "Lars",
            dict(lr=0.5, momentum=0.8, weight_decay=0.0, adapt_1d=True),
            dict(lr=0.5, momentum=0.8, weight_decay=0.0, always_adapt=True),
        ),
        (LAMB, "Lamb", dict(lr=0.05, weight_decay=0.03), dict(lr=0.05, weight_decay=0.03, max_grad_norm=None)),
        (
            LAMB,
            "Lamb",
            dict(lr=0.05, weight_decay=0.03, clamp=(0.0, 1.0)),
            dict(lr=0.05, weight_decay=0.03, max_grad_norm=None, trust_clip=True),
        ),
        (
            PMDLAMB,
            "Lamb",
            dict(lr=0.05, weight_decay=0.03, period=4, factor=1.0),
            dict(lr=0.05, weight_decay=0.03, max_grad_norm=None),
        ),
    ],
)
def test_a_rule_is_timms_where_the_forms_coincide(monkeypatch, batch, ours, theirs, options, their_options):
    import timm.optim

    monkeypatch.setattr(engine.optim.lamb, "BATCH", batch)
    monkeypatch.setattr(engine.optim.lars, "BATCH", batch)
    mine, _ = train(lambda groups: ours(groups, **options))
    other, _ = train(lambda groups: getattr(timm.optim, theirs)(groups, **their_options))
    assert float((mine - other).norm() / other.norm()) < 5e-7  # timm 1.0.31 rounds in another order than 1.0.30


def test_the_two_norms_of_lars_differ_and_so_do_biases_that_adapt():
    runs = [
        train(lambda groups, options=options: LARS(groups, lr=0.5, weight_decay=0.3, **options))[0]
        for options in ({}, {"norm": "sum_of"}, {"adapt_1d": True})
    ]
    assert len({tuple(run.tolist()) for run in runs}) == 3


def test_the_ratio_is_the_papers():
    w, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -2.0]])
    p = torch.nn.Parameter(w.clone())
    optimizer = LARS([p], lr=1.0, momentum=0.0, weight_decay=0.5, trust_coefficient=0.1, eps=0.0)
    p.grad = g
    optimizer.step()
    assert optimizer.ratios == [pytest.approx(0.1 * 5 / 2.5)]  # |g + w / 2| = |(2.5, 0)|
    torch.testing.assert_close(p.detach(), w - 0.2 * (g + 0.5 * w))
    p = torch.nn.Parameter(w.clone())
    optimizer = LAMB([p], lr=1.0, weight_decay=0.5, eps=0.0)
    p.grad = g
    optimizer.step()
    step = torch.tensor([[2.5, 1.0]])  # sign(g) + w / 2
    assert optimizer.ratios == [pytest.approx(5 / float(step.norm()))]
    torch.testing.assert_close(p.detach(), w - 5 / step.norm() * step)


def test_a_layer_without_weights_or_gradient_has_ratio_one():
    for make in (lambda weights: LARS(weights, lr=0.1), lambda weights: LAMB(weights, lr=0.1, weight_decay=0.0)):
        weights = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.ones(2, 2))]
        optimizer = make(weights)
        weights[0].grad, weights[1].grad = torch.ones(2, 2), torch.zeros(2, 2)
        optimizer.step()
        assert optimizer.ratios == [1.0, 1.0]


def test_moments_that_fade_are_still_averages():
    """At every step of a constant gradient, m / c is that gradient; and without decay c is Adam's 1 - beta^t."""
    for period, factor in ((1, 0.5), (3, 0.0), (4, 0.3), (100, 0.3)):
        p = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = PMDLAMB([p], lr=0.0, period=period, factor=factor)
        for t in range(1, 12):
            p.grad = torch.full((2, 2), 0.7)
            optimizer.step()
            state, (first, second) = optimizer.state[p], optimizer.weights((0.9, 0.999), t)
            torch.testing.assert_close(state["exp_avg"] / first, p.grad)
            torch.testing.assert_close(state["exp_avg_sq"] / second, p.grad**2)
    assert _weight(0.9, 37, 5, 1.0) == pytest.approx(1 - 0.9**37)
    assert _weight(0.9, 11, 5, 0.0) == pytest.approx(1 - 0.9)  # begun anew at step 11
    faded = train(lambda groups: PMDLAMB(groups, lr=0.05, period=4, factor=0.2))[0]
    assert float((faded - train(lambda groups: LAMB(groups, lr=0.05))[0]).norm()) > 1e-3


def test_mu_multiplies_the_step_of_a_rule_of_layers():
    for rule in (AGVMLARS, AGVMLAMB):
        moves = []
        for mu in (1.0, 3.0):
            p = torch.nn.Parameter(torch.ones(2, 2))
            optimizer = rule([{"params": [p], "module": "backbone"}], lr=0.1)
            optimizer.modulator.mu["backbone"] = mu
            p.grad = torch.ones(2, 2)
            optimizer.step()
            moves.append(1 - p.detach())
        torch.testing.assert_close(moves[1], 3 * moves[0], rtol=0, atol=1e-6)
        assert float(moves[0].min()) > 5e-5
    assert AGVMLARS([{"params": [p], "module": "backbone"}], lr=1.0, estimator="replicas").companion == "norms"
    assert AGVMLAMB([{"params": [p], "module": "backbone"}], estimator="replicas").companion == "squared"


def test_a_shard_that_nobody_explained_is_refused():
    """DeepSpeed's first step, without gradients, while it builds, changes nothing."""
    p = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = LAMB([p], lr=0.5)
    shard = torch.nn.Parameter(torch.ones(4))
    optimizer.param_groups[0]["params"] = [shard]
    shard.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(shard.detach(), torch.ones(4)) and not optimizer.state
    shard.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"optimizer.attach\(engine\) right after deepspeed.initialize"):
        optimizer.step()


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_a_shard_of_padding_stays_as_it_is_and_one_of_two_layers_has_two_ratios(rule):
    """As under ZeRO: a shard with layer 0 in two elements, layer 1 in the next and padding; and one of padding only."""
    optimizer = (
        rule([torch.nn.Parameter(torch.ones(9, 9))], lr=0.1, weight_decay=0.0, momentum=0.0)
        if rule is LARS
        else rule([torch.nn.Parameter(torch.ones(9, 9))], lr=0.1, weight_decay=0.0)
    )
    shard, padding = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 0.0])), torch.nn.Parameter(torch.zeros(2))
    shard.grad, padding.grad = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(2)
    optimizer.param_groups[0]["params"] = [shard, padding]
    optimizer._norms = object()  # somebody measures
    optimizer.follow([(0, 2), (0, 2)], {shard: [(0, 2, 0), (2, 3, 1)]})
    optimizer.ratios = [2.0, 4.0]
    optimizer.step()
    torch.testing.assert_close(shard.detach(), torch.tensor([0.8, 0.8, 0.6, 0.0]), rtol=0, atol=1e-6)
    assert torch.equal(padding.detach(), torch.zeros(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: LARS(p, lr=-1),
        lambda p: LARS(p, lr=1, trust_coefficient=0),
        lambda p: LARS(p, lr=1, norm="both"),
        lambda p: LARS(p, lr=1, momentum=0, nesterov=True),
        lambda p: LAMB(p, betas=(1.0, 0.9)),
        lambda p: LAMB(p, eps=-1),
        lambda p: LAMB(p, clamp=(2.0, 1.0)),
        lambda p: PMDLAMB(p, period=0, factor=0.5),
        lambda p: PMDLAMB(p, period=2, factor=2),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make([torch.nn.Parameter(torch.zeros(1))])


def built(kind, **params):
    model = torch.nn.ModuleDict({"backbone": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 1)})
    return build_optimizer(OptimizerConfig(type=kind, params={"lr": 0.1, **params}), model, warmup_steps=7)


def test_they_are_built_from_json():
    assert built("LAMB", clamp=[0, 10]).defaults["clamp"] == (0, 10)
    assert built("LARS", norm="sum_of", adapt_1d=True).param_groups[0]["adapt_1d"] is True
    faded = built("PMDLAMB", period=5, factor=0.5)
    assert {group["weight_decay"] for group in faded.param_groups} == {0.01}  # LAMB's default is PMD-LAMB's
    assert built("AGVMLAMB", tau=3, bucket_size=100).modulator.start_step == 7
    assert set(built("AGVMLARS").mu) == {"backbone", "head"}
    for kind, params in (
        ("LAMB", {"tau": 3}),
        ("LARS", {"bucket_size": 5}),
        ("PMDLAMB", {"period": 5}),
        ("LAMB", {"clamp": 3}),
    ):
        with pytest.raises(ConfigError, match=f"optimizer {kind} does not take these params"):
            built(kind, **params)
