"""One live line on rank 0: a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
from tqdm import tqdm

SLOW_DATA = 0.05  # share of a step spent waiting for data, above which the line says so


class LiveLine:
    """Shows the steps of a run or an evaluation, and the time that is left."""

    def __init__(self, *, total: int, label: str, interval: int, start: int = 0, enabled: bool = True) -> None:
        self._enabled, self._total, self._label, self._interval = enabled, total, label, interval
        self._stream, self._done, self._first = sys.stderr, start, start
        self._began = time.monotonic()
        self._bar = (
            tqdm(
                total=total,
                initial=start,
                desc=label,
                file=self._stream,
                dynamic_ncols=True,
                leave=True,
                bar_format="{desc} {percentage:3.0f}%|{bar:16}| {n_fmt}/{total_fmt} {postfix} ETA {remaining}",
            )
            if enabled and self._stream.isatty()
            else None
        )

    def advance(self, count: int) -> None:
        """Count several steps at once, without a text."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)

    def update(self, text: str = "") -> None:
        self._done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._done % self._interval == 0 or self._done == self._total:
            line = f"{self._label} {self._done}/{self._total} {text} ETA {clock(self._remaining())}"
            print(line, file=self._stream, flush=True)

    def _remaining(self) -> float:
        spent = time.monotonic() - self._began
        return spent / max(self._done - self._first, 1) * (self._total - self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"


def step_text(record: Mapping[str, Any]) -> str:
    text = (
        f"epoch {record['epoch']:.2f} loss {record['loss']:.4f} lr {record['lr']:.2e} "
        f"{record['images_per_second']:.1f} img/s {record['memory_gb']:.2f} GB"
    )
    if record["data_seconds"] > SLOW_DATA * record["seconds"]:
        text += f" waiting for data {record['data_seconds'] / record['seconds']:.0%}"
    if "mu" in record:  # AGVM's factors; that of the anchor is always 1
        text += " mu " + " ".join(f"{name.removesuffix('_head')} {value:.2f}" for name, value in record["mu"].items())
    return text


def memory_gb() -> float:
    """The accelerator's peak memory since the start, or without an accelerator this process's resident memory."""
    from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30
