"""Score the validation split during a run, with all ranks, and record the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from engine import distributed
from engine.files import EVALUATIONS, PREDICTIONS, WriteError
from engine.modeling.build import build_model
from engine.modeling.without_storage import give_storage, parameters_on_meta
from engine.monitoring.records import RecordFile
from engine.tasks.base import Prediction
from engine.tasks.predicting import gather_predictions, predict
from engine.tasks.registry import task_of
from engine.train.run import GOES_ON, Run
from engine.zero.whole_parameters import whole_state


def plain_model(run: Run) -> nn.Module:
    """A model that each rank can run alone. Under ZeRO-3 this is a gathered copy: a partitioned model waits for the
    other ranks at every layer, but in evaluation ranks see different numbers of images and objects."""
    if run.stage != 3:
        return run.engine.module
    source = run.engine.module
    copy = _empty_copy(run)
    target = copy.state_dict()
    for name, value in whole_state(source):
        target[name].copy_(value)
    # Buffers that no state dict holds, such as tables of positions: those that the run trains with.
    own = dict(copy.named_buffers())
    for name, buffer in source.named_buffers():
        if name not in target and name in own and own[name].shape == buffer.shape:
            own[name].copy_(buffer)
    return copy


def _empty_copy(run: Run) -> nn.Module:
    """The run's model in its own type on the device, without values, and never whole in fp32: all ranks of a host build
    it at the same time."""
    detector = run.config.detector.model_copy(update={"zero_init": False})
    task = task_of(run.config.model_copy(update={"detector": detector}))
    try:
        with parameters_on_meta():
            model = build_model(task, run.classes, empty=True)
    except (NotImplementedError, RuntimeError):  # a constructor that reads a parameter: a run must not end for that
        model = build_model(task, run.classes, empty=True)
    model.to(run.precision.dtype)
    give_storage(model, distributed.device())
    return model


def evaluate_and_report(run: Run, model: nn.Module, step: int, *, last: bool) -> dict[str, float]:
    """Score the validation split, record it, and after the last step write results and pictures."""
    config = run.config
    began = time.monotonic()
    with distributed.together():
        mine = predict(
            model,
            run.preprocess,
            run.precision,
            run.val.dataset,
            batch=config.run.eval_batch_size,
            workers=config.data.workers,
            as_numbers=partial(run.task.as_numbers, classes=run.classes),
        )
    predicted = time.monotonic()
    metrics: dict[str, float] = {}
    with distributed.together():
        predictions = gather_predictions(mine, len(run.val.dataset))
    scored = run.task.score_with_ranks(predictions, run.val, run.classes)
    with distributed.together():
        if predictions is not None:
            try:
                metrics = _write_evaluation(run, predictions, scored, step, last=last)
                seconds = {"predict_seconds": predicted - began, "score_seconds": time.monotonic() - predicted}
                _report_seconds(run, seconds, step)
            except WriteError as error:
                if config.run.on_save_error == "stop":
                    raise
                print(f"{error}; {GOES_ON}", flush=True)
                run.lost_record = str(error)
    return distributed.broadcast_object(metrics)


def _report_seconds(run: Run, seconds: dict[str, float], step: int) -> None:
    """Printed and sent to the monitors, not recorded: a resumed run has the records of one that was not stopped."""
    said = ", ".join(f"{name.removesuffix('_seconds')} {value:.1f} s" for name, value in seconds.items())
    print(f"score   step {step}: {said}", flush=True)
    if run.engine.monitor.enabled:
        run.engine.monitor.write_events([(f"val/{name}", value, step) for name, value in seconds.items()])


def _write_evaluation(
    run: Run, predictions: Sequence[Prediction], scored: Any, step: int, *, last: bool
) -> dict[str, float]:
    metrics = run.task.write_scores(run.work_dir, predictions, run.val, run.classes, table=last, scored=scored)
    records = RecordFile(run.work_dir / EVALUATIONS)
    records.write({"step": step, **metrics})
    records.close()
    if run.engine.monitor.enabled:
        run.engine.monitor.write_events([(f"val/{name}", value, step) for name, value in metrics.items()])
    if last and run.config.run.draw:
        run.task.draw_predictions(run.work_dir / PREDICTIONS, predictions, run.val, run.classes)
    return metrics
