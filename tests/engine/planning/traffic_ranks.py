"""A run on real ranks, with every collective of each of its steps noted, beside what was predicted for it."""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

from tiny_run import merged


def measured_and_predicted(changes: dict[str, Any], exact_order: bool = True) -> dict[str, Any]:
    """Counts of (operation, bytes) for each step of a tiny run, on this rank, and the predictions."""
    from engine import distributed, training
    from engine.config import parse_config
    from engine.planning.gathers import model_uses
    from engine.planning.partition import parameters_of
    from engine.planning.recording import CollectiveRecorder, OrderRecorder, count_calls
    from engine.planning.settings import communication_settings, window_settings
    from engine.planning.traffic import step_calls, step_traffic

    recorder, kept, steps = CollectiveRecorder(), {}, []
    build, note, finish = training.build_run, training.step_record, training.finish_report
    init = distributed.import_deepspeed().initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        kept["parameters"] = parameters_of(kwargs["model"], kwargs["optimizer"].param_groups)
        kept["uses"] = model_uses(kwargs["model"])
        return init(*args, **kwargs)

    def keep(*args: Any) -> Any:
        kept["run"] = build(*args)
        kept["order"] = OrderRecorder(kept["run"].engine)
        recorder.take()
        return kept["run"]

    def step_record(run: Any, *args: Any, **kwargs: Any) -> Any:
        record = note(run, *args, **kwargs)
        steps.append((count_calls(recorder.take()), *kept["order"].take()))
        return record

    import deepspeed

    deepspeed.initialize = initialize
    training.build_run, training.step_record, training.finish_report = keep, step_record, lambda work_dir: None
    folder = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    try:
        with recorder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            training.train(parse_config(merged({"run": {"work_dir": folder}}, merged(changes))))
    finally:
        deepspeed.initialize = init
        training.build_run, training.step_record, training.finish_report = build, note, finish
        if "run" in kept:
            kept["run"].engine.destroy()
    run = kept["run"]
    settings = communication_settings(run.config.deepspeed, run.plan.world, run.plan.accumulation)
    window = window_settings(run.config.optimizer.type, run.config.optimizer.params)
    modulator = getattr(run.optimizer, "modulator", None)
    predictions, first = [], True
    for step, (_, order, uses) in enumerate(steps, start=1):
        trained = sum(p.trained for p in kept["parameters"])
        assert len(order) == trained * run.plan.accumulation
        collectives = step_traffic(
            kept["parameters"], settings, window=window, losses=len(run.loss_names), backend="gloo",
            order=order[-trained:] if exact_order else None,
            uses=uses[len(uses) // run.plan.accumulation * (run.plan.accumulation - 1):] if exact_order else kept["uses"])
        in_window = modulator is not None and modulator.is_window(step)
        predictions.append(step_calls(collectives, run.plan.accumulation, window=in_window, first=in_window and first))
        first = first and not in_window
    return {"measured": [calls for calls, *_ in steps], "predicted": predictions}
