"""One training step of a small UniNet + HTC-X through the real loop: data, detector, ZeRO-2, AGVM, records."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from pathlib import Path
from typing import TextIO

from engine import distributed
from engine.doctor.finding import Finding
from engine.files import METRICS
from engine.monitoring.records import read_records
from engine.recipes.load import load_config
from engine.train.after_step import Preempted
from engine.train.loop import train

ACCUMULATION = 2  # AGVM compares two halves of the batch, also on one rank


class _ErrorsOnly(io.StringIO):
    """Without the live line and bars of progress, but with the sentence about a rank that is gone."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text) if text.startswith("error:") else len(text)


def one_step(work_dir: Path) -> Finding:
    batch = ACCUMULATION * distributed.world_size()
    config = load_config(
        "shapes_htcx",
        [
            f"train_batch_size={batch}",
            "train_micro_batch_size_per_gpu=1",
            f"gradient_accumulation_steps={ACCUMULATION}",
            f"data.shapes.train_images={batch}",
            "data.shapes.val_images=1",
            "data.workers=0",
            "optimizer.params.tau=1",
            "optimizer.params.start_step=0",
            "schedule.epochs=null",
            "schedule.steps=1",
            "schedule.warmup_steps=0",
            "run.eval_interval=0",
            "run.checkpoint_interval=0",
            f"run.work_dir={work_dir}",
        ],
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(_ErrorsOnly(sys.stderr)):
            train(config)
    except Preempted:  # the loop turns Ctrl-C into this
        raise KeyboardInterrupt from None
    records = distributed.broadcast_object(read_records(work_dir / METRICS) if distributed.rank() == 0 else None)
    record = records[-1]
    loss, mu = record["loss"], record.get("mu") or {}
    finite = isinstance(loss, float) and math.isfinite(loss) and all(math.isfinite(x) for x in mu.values())
    return Finding(
        f"loss {loss if isinstance(loss, str) else f'{loss:.3f}'} (finite), mu of {len(mu)} modules, "
        f"ZeRO-2, batch {batch}",
        finite and bool(mu),
        {"record": record},
    )
