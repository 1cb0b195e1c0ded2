"""Other numbers of GPUs and other batches: none is left out because ranks cannot divide it; misfits are marked."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from traced_plan import CARD, traced_plan

from engine.planning.report import BATCHES, WORLDS, divisible_batches, scaling_points, scaling_table


@given(st.sets(st.integers(1, 20_000), min_size=1), st.integers(1, 4000))
def test_every_batch_becomes_the_nearest_that_can_be_divided_once(wanted, unit):
    found = divisible_batches(wanted, unit)
    batches = [batch for _, batch in found]
    assert found and len(set(batches)) == len(batches)
    assert all(column in wanted and batch >= unit and batch % unit == 0 for column, batch in found)
    assert all(any(abs(batch - column) <= max(unit / 2, unit - column) for batch in batches) for column in wanted)


def test_all_numbers_of_gpus_and_the_plans_own_are_there_at_any_micro_batch():
    for micro, world in ((2, 8), (3, 6)):
        plan = traced_plan(world=world, batch=micro * world * 2, micro=micro)
        points = scaling_points(plan, CARD)
        assert {point.world for point in points} == {*WORLDS, world}
        assert (world, plan.batch.total) in {(point.world, point.batch) for point in points}
        assert all(point.batch % (micro * point.world) == 0 for point in points)
    assert (768, 4608, 4096) in {(point.world, point.batch, point.column) for point in points}
    assert "@4608" in scaling_table(points)


def test_batches_that_can_be_divided_stay_as_they_are():
    points = scaling_points(traced_plan(batch=32), CARD)
    assert [point.batch for point in points if point.world == 8] == list(BATCHES)
    assert "@" not in "".join(scaling_table([point for point in points if point.world != 768]))


def test_points_that_do_not_fit_are_marked():
    # 7/8 of moments and master weights go away from 8 ranks to 64 under ZeRO-1, not the weights.
    plan = traced_plan(
        zero_optimization={"stage": 1, "reduce_bucket_size": 1000, "overlap_comm": False},
        optimizer={"type": "AdamW", "params": {"lr": 1e-4}},  # AGVM's window depends on the accumulation too
    )
    few, many = plan.at(8).memory().peak, plan.at(64).memory().peak
    card = replace(CARD, memory=CARD.reserved + (1 + CARD.fragmentation) * (few + many) / 2)
    points = scaling_points(plan, card)
    assert {point.fits for point in points if point.world == 8} == {False}
    assert {point.fits for point in points if point.world == 64 and point.batch == 128} == {True}
    assert "* does not fit" in scaling_table(points)
    assert "*" not in scaling_table(scaling_points(plan, CARD))


def test_a_run_of_less_than_a_step_has_one():
    assert all(point.hours > 0 for point in scaling_points(traced_plan(schedule={"epochs": 0.004}), CARD))
