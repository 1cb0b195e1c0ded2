"""Predicted against measured communication: a run is trained on real ranks, and every collective is recorded."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from engine import distributed
from engine.optim.registry import build_optimizer
from engine.planning.model_facts import model_facts
from engine.planning.step_trace import build_shape_model
from engine.planning.traffic import step_calls, step_traffic
from engine.recipes.load import parse_config
from engine.train import loop
from engine.train.build import build_run
from engine.zero.recording import CollectiveRecorder, OrderRecorder, count_calls, with_all_to_all_totals
from engine.zero.settings import communication_settings


class ComparedStep(NamedTuple):
    """Calls of each (operation, payload bytes) in one optimizer step."""

    measured: Counter[tuple[str, int]]
    predicted: Counter[tuple[str, int]]
    window: bool

    def payload(self) -> tuple[int, int]:
        measured, predicted = (sum(size * calls for (_, size), calls in kind.items()) for kind in self[:2])
        return measured, predicted


def measured_and_predicted(content: dict[str, Any], follow_order: bool = False) -> list[ComparedStep]:
    """Train on this rank's process group and compare step by step.

    `follow_order` gives the prediction the order in which gradients came and modules ran, which decides where buckets
    end but not how much is sent.
    """
    folder = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    config = parse_config({**content, "run": {**content.get("run", {}), "work_dir": folder}})
    recorder, seen, step_record = CollectiveRecorder(), [], loop.step_record

    def noted(*args: Any, **kwargs: Any) -> Any:
        record = step_record(*args, **kwargs)
        seen.append((recorder.take(), *order_recorder.take()))
        return record

    patches = mock.patch.multiple(loop, step_record=noted, finish_report=lambda work_dir: None)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = build_run(config)
        order_recorder = OrderRecorder(run.engine)
        try:
            with recorder, patches:
                loop.run_schedule(run)
        finally:
            run.engine.destroy()
    shapes = build_shape_model(run.config, run.classes)
    model = model_facts(shapes, build_optimizer(run.config.optimizer, shapes, warmup_steps=0), run.config)
    accumulation, trained = run.plan.accumulation, sum(p.trained for p in model.parameters)
    settings = communication_settings(run.config.deepspeed, run.plan.world, accumulation)
    modulator = getattr(run.optimizer, "modulator", None)
    losses, steps, first = len(run.forward.loss_names or ()), [], True
    for number, (calls, order, uses) in enumerate(seen, start=1):
        if follow_order:  # of the last micro-step
            model = replace(model, uses=uses[len(uses) // accumulation * (accumulation - 1) :])
        last = order[-trained:] if follow_order else None
        collectives = step_traffic(model, settings, order=last, losses=losses, backend="gloo")
        window = modulator is not None and modulator.is_window(number)
        rank = distributed.rank()
        predicted = step_calls(collectives, accumulation, window=window, first=window and first, rank=rank)
        steps.append(ComparedStep(count_calls(with_all_to_all_totals(calls)), predicted, window))
        first = first and not window
    return steps
