"""The learning rate as a function of the optimizer step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.schema import ScheduleConfig
from engine.errors import ConfigError
from engine.optim.schedule import build_schedule


def schedule(steps_per_epoch=10, **options):
    return build_schedule(ScheduleConfig(**options), steps_per_epoch)


def factors(*args, **options):
    built = schedule(*args, **options)
    return [built.factor(step) for step in range(built.steps)]


def test_linear_warm_up_rises_evenly_to_the_base_rate():
    got = factors(steps=8, warmup_steps=4, warmup_start=0.2, decay="constant")
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1])


def test_exponential_warm_up_grows_by_one_ratio():
    got = factors(steps=6, warmup_steps=4, warmup_start=0.0001, warmup="exponential", decay="constant")
    assert got == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 1])


def test_warm_up_in_epochs_is_that_many_steps():
    assert schedule(30, epochs=4, warmup_epochs=1.5).warmup_steps == 45
    assert schedule(30, epochs=4).warmup_steps == 0 and schedule(30, epochs=4).factor(0) == 1


def test_drops_stand_at_epochs_as_mmdet_writes_them():
    """mmdet's 1x schedule: 12 epochs with drops after 8 and 11."""
    got = factors(5, epochs=12, decay="multistep", milestones=[11, 8])
    assert got == pytest.approx([1] * 40 + [0.1] * 15 + [0.01] * 5)


def test_drops_stand_at_fractions_of_any_length():
    assert schedule(7, steps=200, milestones=[0.75, 0.917]).milestones == (150, 183)
    got = factors(steps=8, milestones=[0.5, 0.75], gamma=0.5)
    assert got == [1] * 4 + [0.5] * 2 + [0.25] * 2
    # Fractions and epochs may be mixed, and 1 is the first epoch.
    assert schedule(3, steps=8, milestones=[0.5, 1]).milestones == (3, 4)


@given(st.integers(2, 500))
def test_poly_is_the_papers_formula(steps):
    got = factors(steps=steps, decay="poly", power=0.9)
    assert got == pytest.approx([(1 - step / steps) ** 0.9 for step in range(steps)])


@given(st.integers(2, 500), st.floats(0, 1))
def test_cosine_falls_from_one_to_its_least_factor(steps, least):
    built = schedule(steps=steps, decay="cosine", min_factor=least)
    got = [built.factor(step) for step in range(steps + 1)]
    assert got[0] == pytest.approx(1) and got[-1] == pytest.approx(least)
    assert got[steps // 2] == pytest.approx(least + (1 - least) * (1 + math.cos(math.pi * (steps // 2) / steps)) / 2)
    assert all(a >= b for a, b in zip(got, got[1:]))
    assert got[0] + got[-1] == pytest.approx(got[1] + got[-2])  # point symmetric


def test_constant_stays():
    assert set(factors(steps=9, decay="constant")) == {1.0}


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.sampled_from(["multistep", "poly", "cosine", "constant"]),
    st.sampled_from(["linear", "exponential"]),
    st.data(),
)
def test_warm_up_multiplies_the_decay_and_ends_with_it(steps, steps_per_epoch, decay, shape, data):
    warmup = data.draw(st.integers(0, steps))
    plain = schedule(steps_per_epoch, steps=steps, decay=decay)
    warm = schedule(steps_per_epoch, steps=steps, decay=decay, warmup=shape, warmup_steps=warmup)
    for step in range(steps):
        assert 0 <= warm.factor(step) <= plain.factor(step) <= 1
        assert (warm.factor(step) == plain.factor(step)) == (step >= warmup or plain.factor(step) == 0)


@given(st.floats(0.01, 40), st.integers(1, 1000))
def test_the_length_in_epochs_is_rounded_to_steps_and_never_nothing(epochs, steps_per_epoch):
    built = schedule(steps_per_epoch, epochs=epochs)
    assert built.steps >= 1 and abs(built.steps - epochs * steps_per_epoch) <= 1


def test_a_warm_up_longer_than_the_run_is_refused():
    assert schedule(steps=10, warmup_steps=10).warmup_steps == 10
    with pytest.raises(ConfigError, match="warm-up of 11 steps is longer than the run of 10 steps"):
        schedule(steps=10, warmup_steps=11)
    with pytest.raises(ConfigError, match="warm-up of 30 steps is longer than the run of 20 steps"):
        schedule(10, epochs=2, warmup_epochs=3)
