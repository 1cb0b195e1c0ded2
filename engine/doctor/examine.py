"""The whole examination, in order: what is here, how the ranks reach each other, and whether the promises hold."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from engine import distributed
from engine.doctor import disk, facts, network, place, proofs
from engine.doctor.examination import Examination


def examine(examination: Examination, work_dir: Path, *, quick: bool) -> None:
    """All checks, on ranks that have met. Each ends in a line, whatever becomes of it; UserError if one failed."""
    ranks = distributed.all_gather_objects(facts.rank_facts())
    examination.keep("ranks", ranks)
    place.show_facts(examination, ranks)
    folder = Path(distributed.broadcast_object(_scratch(work_dir)))
    try:
        examination.check("same everywhere", lambda: place.alike(ranks))
        examination.check("own device", lambda: place.own_devices(ranks))
        examination.check("disk, shared", lambda: disk.shared_and_atomic(folder))
        examination.check("disk, speed", lambda: disk.write_speed(folder))
        examination.check("clocks", network.clocks)
        examination.check("small messages", network.control_latency)
        examination.check("all-reduce", network.all_reduce)
        if not quick:
            _prove(examination, folder)
        examination.close()
    finally:
        if distributed.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _scratch(work_dir: Path) -> str:
    return tempfile.mkdtemp(prefix="doctor-", dir=work_dir) if distributed.rank() == 0 else ""


def _prove(examination: Examination, folder: Path) -> None:
    from engine.doctor import htcx, kernels  # here: importing mmdet takes seconds, which --quick need not wait for

    examination.check("imports", kernels.imports)
    for name, kernel in kernels.KERNELS.items():
        examination.check(name, kernel)
    stages = proofs.StageProofs()
    for stage in proofs.STAGES:
        examination.check(f"AGVM = twin, ZeRO-{stage}", functools.partial(stages.follows_twin, stage))
    examination.check("stages alike", stages.stages_alike)
    for stage in (2, 3):
        examination.check(
            f"save = resume, ZeRO-{stage}",
            functools.partial(proofs.resumes_alike, stage, folder / f"resumed-{stage}"),
        )
    examination.check("HTC-X, one step", lambda: htcx.one_step(folder / "htcx"))
