"""What a plan recommends and what it says of a config that does not fit, from traces that are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traced_plan import CARD, traced_plan

from engine.errors import ConfigError
from engine.planning.memory import OFFLOADS, Memory
from engine.planning.plan import Way
from engine.planning.report import Choice, Report, choices, recommended
from engine.planning.time import StepTime, run_time


def _choice(stage: int, peak: float, seconds: float, *, fits: bool = True, offload: str = OFFLOADS[0]) -> Choice:
    memory = Memory(phases={"forward": peak})
    step = StepTime(seconds, 0, 0, 0, 0, 0, 0, 0, 0)
    return Choice(Way(stage, offload, recompute=False), memory, step, fits, own=False)


@pytest.mark.parametrize(
    "expected, found",
    [
        (0, [_choice(0, 50, 1.0), _choice(2, 20, 1.1)]),  # clearly faster
        (2, [_choice(0, 50, 1.0), _choice(2, 20, 1.01)]),  # hardly slower, and needs less
        (2, [_choice(1, 20, 1.01), _choice(2, 20, 1.0)]),  # a tie in memory goes to the faster
        (3, [_choice(0, 90, 1.0, fits=False), _choice(3, 40, 2.0), _choice(2, 30, 1.5, offload=OFFLOADS[1])]),
        (2, [_choice(0, 90, 1.0, fits=False), _choice(2, 30, 1.5, offload=OFFLOADS[1])]),  # where nothing else fits
        (None, [_choice(0, 90, 1.0, fits=False)]),
    ],
)
def test_the_fastest_that_fits_is_recommended(expected, found):
    best = recommended(found)
    assert (best and best.way.stage) == expected


def test_what_an_optimizer_refuses_is_neither_recommended_nor_planned():
    fp16 = {"fp16": {"enabled": True}}
    assert {c.way.stage for c in choices(traced_plan(zero_optimization={"stage": 1}, **fp16), CARD)} == {1, 2, 3}
    with pytest.raises(ConfigError, match="AGVMAdamW does not support fp16 at ZeRO stage 0: set"):
        traced_plan(**fp16)
    with pytest.raises(ConfigError, match="LAMB does not support fp16 at ZeRO stage 0"):
        traced_plan(optimizer={"type": "LAMB", "params": {"lr": 1e-4}}, **fp16)
    sgd = traced_plan(optimizer={"type": "SGD", "params": {"lr": 1e-4}}, **fp16)
    assert {c.way.stage for c in choices(sgd, CARD)} == {0, 1, 2, 3}


@pytest.mark.parametrize("zero", [{}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}])
def test_the_configs_own_setting_is_a_row_of_its_own_also_where_it_is_unusual(zero):
    plan = traced_plan(
        zero_optimization=zero, detector={"config": "tiny_retinanet", "checkpoint_activations": ["backbone"]}
    )
    (own,) = [choice for choice in choices(plan, CARD) if choice.own]
    assert own.way == plan.way and own.way.recompute
    assert own.step == run_time(plan, CARD).step


def test_a_config_that_does_not_fit_is_told_before_its_times_with_those_of_the_recommended_setting():
    plan, card = (
        traced_plan(),
        replace(CARD, memory=1.65e9),
    )  # 40 MB of weights, 80 of moments, 40 of gradients, 170 of a window
    report = Report(plan, card)
    assert report.best is None and not report.own.fits
    assert "THIS CONFIG DOES NOT FIT: it needs 0.3 GB of the 0.1 that a100-80g has" in report.misfit_text()
    row = next(line for line in report.memory_table().splitlines() if "this config" in line)
    assert row.split()[:3] == ["0", "-", "no"] and "does not fit" in row
    report.best = report.choices[3]._replace(fits=True)
    hours = run_time(plan, card, report.best.step).hours
    assert f"{report.best.step.total:.3f} s a step, {hours:.2f} hours" in report.misfit_text()


def test_evaluation_of_data_that_is_not_known_is_not_given_as_nothing():
    plan = traced_plan()
    plan.data = plan.data._replace(val=None)
    report = Report(plan, CARD)
    assert "evaluation not known" in report.time_text() and report.time.hours > 0
    written = report.as_json([])
    assert written["evaluation_seconds"] is None and written["checkpoint_seconds"] == report.time.checkpoints
    assert written["forward_flops_per_image"] == 39 * 10**10
    assert written["mean_image_size"] == {"height": 64, "width": 64}
