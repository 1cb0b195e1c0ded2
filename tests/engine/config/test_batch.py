"""The batch triangle: whatever comes back holds, and what cannot hold is explained in one sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import solve_batch
from engine.config.batch import KEYS
from engine.errors import ConfigError

SIZES = st.integers(1, 64)
MAYBE = st.none() | st.just("auto") | st.integers(1, 256)


@given(MAYBE, MAYBE, MAYBE, st.integers(1, 16), st.booleans())
def test_a_plan_holds_or_is_refused_in_one_sentence(total, micro, accumulation, world, absent):
    given_values = dict(zip(KEYS, (total, micro, accumulation)))
    if absent:  # a key left out, null and "auto" are one and the same
        given_values = {key: value for key, value in given_values.items() if isinstance(value, int)}
    try:
        plan = solve_batch(given_values, world)
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).count(". ") == 0
        numbers = [v for v in (total, micro) if isinstance(v, int)]
        assert all(str(number) in str(error) for number in numbers)
        return
    assert plan.total == plan.micro * plan.accumulation * plan.world and plan.world == world
    assert min(plan) >= 1 and plan.micro_batches * plan.micro == plan.total
    for key, value in plan.as_keys().items():
        assert given_values.get(key) in (value, None, "auto")
    assert solve_batch(plan.as_keys(), world) == plan


@given(
    SIZES,
    SIZES,
    st.integers(1, 16),
    st.sampled_from([(True, True, True), (True, True, False), (True, False, True), (False, True, True)]),
)
def test_any_two_of_the_three_give_the_third(micro, accumulation, world, known):
    whole = dict(zip(KEYS, (micro * accumulation * world, micro, accumulation)))
    given_values = {key: whole[key] for key, is_known in zip(KEYS, known) if is_known}
    assert solve_batch(given_values, world).as_keys() == whole


@given(SIZES, st.integers(1, 16))
def test_a_global_batch_alone_means_no_accumulation(micro, world):
    assert solve_batch({"train_batch_size": micro * world}, world) == (micro * world, micro, 1, world)


@given(st.integers(1, 500), st.integers(2, 16))
def test_an_indivisible_batch_is_answered_with_ones_that_work(total, world):
    try:
        solve_batch({"train_batch_size": total}, world)
    except ConfigError as error:
        assert total % world
        suggested = str(error).split(": use ")[1].split(", or other")[0].split(" or ")
        assert suggested and all(solve_batch({"train_batch_size": int(s)}, world).total == int(s) for s in suggested)
    else:
        assert total % world == 0


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, -4, 2.0, "8", True, [], {}])
def test_what_is_no_size_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=rf'^{key} must be a whole number >= 1 or "auto", got '):
        solve_batch({"train_batch_size": 8, key: value}, 1)


def test_nothing_given_is_refused():
    with pytest.raises(ConfigError, match="neither is set"):
        solve_batch({"gradient_accumulation_steps": 4}, 2)
