"""What a finished run leaves for people to look at."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoints.store import checkpoints_of, saved_steps
from engine.files import CHECKPOINTS, CURVES, EVAL, METRICS, PREDICTIONS
from engine.monitoring.curves import draw_curves


def finish_report(work_dir: Path) -> None:
    try:
        draw_curves(work_dir)
    except OSError as error:
        print(f"curves.png cannot be written: {error.strerror}", flush=True)
    shown = [name for name in (EVAL, CURVES, PREDICTIONS, METRICS) if (work_dir / name).exists()]
    if steps := saved_steps(checkpoints_of(work_dir)):
        shown.append(f"{CHECKPOINTS} (the newest of step {steps[-1]})")
    print(f"written to {work_dir}: {', '.join(shown)}", flush=True)
