"""The record of every step: put together when the step is over, written when the device has passed it."""

from __future__ import annotations

import time
from typing import Any

import torch

from engine.distributed import say
from engine.files import WriteError
from engine.monitoring.deferred import Deferred
from engine.monitoring.live import LiveLine, memory_gb, step_text
from engine.monitoring.records import RecordFile
from engine.optim.agvm import AGVMOptimizer
from engine.train.run import GOES_ON, Run


def step_record(
    run: Run, step: int, losses: list[dict[str, float]], lr_factor: float, *, began: float, waited: float
) -> tuple[dict[str, Any], Deferred]:
    """The record of one optimizer step, with losses averaged over the micro-batches of all ranks, and its gradient
    norm, which is still on the device."""
    seconds = time.monotonic() - began
    record: dict[str, Any] = {
        "step": step + 1,
        "epoch": (step + 1) / run.schedule.steps_per_epoch,
        **{name: sum(part.get(name, 0.0) for part in losses) / len(losses) for name in losses[-1]},
        "lr": run.config.optimizer.params["lr"] * lr_factor,
        "grad_norm": None,
        "images_per_second": run.plan.total / seconds,
        "seconds": seconds,
        "data_seconds": waited,
        "memory_gb": memory_gb(),
    }
    if run.precision.dtype == torch.float16:
        record["loss_scale"] = run.layout.loss_scale()
    if isinstance(run.optimizer, AGVMOptimizer):
        modulator = run.optimizer.modulator
        record["mu"] = dict(modulator.mu)
        if modulator.last_window == step + 1:  # phi was measured in this step
            record["phi"] = dict(modulator.phi)
    return record, Deferred(run.engine.get_global_grad_norm())


class Journal:
    """The records of the steps, on rank 0. One is written when the device has passed its step: the gradient norm is
    still being computed when the step is over for the host."""

    def __init__(self, run: Run, records: RecordFile | None, line: LiveLine) -> None:
        self._run, self._records, self._line = run, records, line
        self._kept: tuple[dict[str, Any], Deferred] | None = None

    def keep(self, record: dict[str, Any], norm: Deferred) -> None:
        self._kept = record, norm

    def write(self) -> None:
        """Write what is kept. If that fails, the other ranks learn of it in the next step."""
        if self._kept is None:
            return
        (record, norm), self._kept = self._kept, None
        record["grad_norm"] = norm.read()
        if self._records is not None:
            self._write(self._records, record)
        self._line.update(step_text(record))

    def _write(self, records: RecordFile, record: dict[str, Any]) -> None:
        run = self._run
        try:
            records.write(record)
            write_events(run.engine, record)
        except WriteError as error:
            if run.lost_record is None:
                say(f"{error}; {GOES_ON}" if run.config.run.on_save_error == "continue" else str(error))
            run.lost_record = str(error)


def write_events(model_engine: Any, record: dict[str, Any]) -> None:
    """Send the record to DeepSpeed's monitors (tensorboard, csv_monitor, wandb) that the config enables."""
    if model_engine.monitor.enabled:
        events = []
        for key, value in record.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                if key != "step" and number is not None:
                    events.append((f"train/{key}{'/' + name if name else ''}", number, record["step"]))
        model_engine.monitor.write_events(events)
