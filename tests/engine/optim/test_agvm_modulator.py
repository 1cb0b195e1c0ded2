"""The modulator's arithmetic against the definition, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.optim import AGVMSGD, Modulator
from engine.optim.reference import variance

OPTIONS = dict(tau=1, alpha=0.5, anchor="a", estimator="halves", clip=(0.1, 10), start_step=0, ratio_eps=1e-12)


def modulator(**changes):
    return Modulator(["a", "b"], **{**OPTIONS, **changes})


def sums_of(u, D, estimator):
    """The three sums as the sharded code forms them."""
    R = len(u)
    g = sum(u) / R
    if estimator == "replicas":
        n, S = float((D * g).square().sum()), float(sum((D * x).square().sum() for x in u) / R)
        return [n, S, S - n]
    n1, n2 = (R + 1) // 2, R // 2
    d = sum((R / (2 * n1) if j < n1 else -R / (2 * n2)) * x for j, x in enumerate(u)) / R
    return [float((D * g) @ (D * g)), float((D * d) @ (D * d)), float((D * g) @ (D * d))]


@settings(max_examples=100, deadline=None)
@given(
    R=st.integers(2, 9),
    size=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(["halves", "replicas"]),
    signal=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_variance_from_three_sums_is_the_definition(R, size, seed, estimator, signal):
    generator = torch.Generator().manual_seed(seed)
    mean = signal * torch.randn(size, generator=generator, dtype=torch.float64)
    u = [mean + torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(R)]
    D = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    got = modulator(estimator=estimator).variance(sums_of(u, D, estimator), R)
    assert got == pytest.approx(variance(u, D, estimator), rel=1e-7, abs=1e-10)
    assert 0 <= got <= 2


def test_both_estimators_aim_at_the_same_variance():
    generator = torch.Generator().manual_seed(0)
    phi = {"halves": [], "replicas": []}
    for _ in range(300):
        mean = torch.ones(400, dtype=torch.float64) * 0.6
        u = [mean + torch.randn(400, generator=generator, dtype=torch.float64) for _ in range(8)]
        for estimator in phi:
            phi[estimator].append(modulator(estimator=estimator).variance(sums_of(u, torch.ones(400), estimator), 8))
    halves, replicas = (torch.tensor(phi[e]) for e in ("halves", "replicas"))
    assert float(replicas.mean()) == pytest.approx(float(halves.mean()), rel=0.03)
    assert replicas.std() < halves.std()


def test_mu_moves_by_the_clipped_ratio():
    m = modulator(clip=(0.5, 2.0))
    assert m.update(1, {"a": [1.0, 0.5, 0.0], "b": [1.0, 0.25, 0.0]}, 2)
    phi = {"a": 1 - 0.5 / 1.5, "b": 1 - 0.75 / 1.25}
    assert m.phi == pytest.approx(phi)
    assert m.mu == pytest.approx({"a": 1.0, "b": 0.5 + 0.5 * math.sqrt(phi["a"] / phi["b"])})
    m.update(2, {"a": [1.0, 0.9, 0.0], "b": [1.0, 1e-9, 0.0]}, 2)
    assert m.mu["b"] == pytest.approx(0.5 * (0.5 + 0.5 * math.sqrt(phi["a"] / phi["b"])) + 0.5 * 2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_discards_the_window(bad):
    m = modulator()
    m.update(1, {"a": [1.0, 0.5, 0.0], "b": [1.0, 0.25, 0.0]}, 2)
    before = (dict(m.mu), dict(m.phi))
    assert not m.update(2, {"a": [1.0, 0.5, 0.0], "b": [bad, 0.25, 0.0]}, 2)
    assert (m.mu, m.phi) == before and (m.windows, m.discarded) == (1, 1)


def test_a_module_without_gradient_keeps_mu_and_an_anchor_without_one_discards():
    m = modulator()
    m.update(1, {"a": [1.0, 0.5, 0.0], "b": [1.0, 0.25, 0.0]}, 2)
    mu = dict(m.mu)
    assert m.update(2, {"a": [1.0, 0.5, 0.0], "b": [0.0, 0.0, 0.0]}, 2)
    assert m.mu == mu and set(m.phi) == {"a"}
    assert m.update(3, {"a": [1.0, 0.5, 0.0], "b": [1.0, 1.0, 1.0]}, 2)  # only one half has a gradient
    assert m.mu == mu and set(m.phi) == {"a"}
    assert not m.update(4, {"a": [0.0, 0.0, 0.0], "b": [1.0, 0.25, 0.0]}, 2)
    assert m.mu == mu


def test_windows_count_from_one_and_begin_after_start_step():
    assert [t for t in range(1, 13) if modulator(tau=3).is_window(t)] == [3, 6, 9, 12]
    assert [t for t in range(1, 13) if modulator(tau=3, start_step=6).is_window(t)] == [9, 12]


def test_state_is_keyed_by_module_name():
    m = modulator()
    m.update(1, {"a": [1.0, 0.5, 0.0], "b": [1.0, 0.25, 0.0]}, 2)
    other = Modulator(["c", "b", "a"], **OPTIONS)
    other.load_state_dict(m.state_dict())
    assert other.mu == {"c": 1.0, "b": m.mu["b"], "a": 1.0} and other.windows == 1 and other.phi == m.phi


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tau": 0}, "tau must be a whole number >= 1, got 0"),
        ({"alpha": 1.0}, r"alpha must be in \[0, 1\), got 1.0"),
        ({"anchor": "x"}, "anchor must be one of"),
        ({"estimator": "x"}, "estimator must be one of"),
        ({"clip": (2, 10)}, "clip must be"),
        ({"start_step": "warmup"}, "start_step must be a whole number"),
        ({"ratio_eps": -1}, "ratio_eps must be >= 0"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(changes, words):
    with pytest.raises(ValueError, match=words):
        modulator(**changes)


def test_groups_must_name_their_module():
    with pytest.raises(ValueError, match="module_groups"):
        AGVMSGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
