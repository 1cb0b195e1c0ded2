"""A small study as a user runs it: stopped, gone on with, and its report."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forking import Script

ROOT = Path(__file__).resolve().parents[2]

STUDY = {
    "config": "shapes_faster_rcnn",
    "set": [
        "detector.config=micro_faster_rcnn",
        "data.shapes.train_images=24",
        "data.shapes.val_images=8",
        "data.shapes.image_size=64",
        "data.scale=[64, 64]",
        "data.workers=0",
        "run.max_nonfinite=1",
    ],
    "batches": [4, 8],
    "micro_batch": 2,
    "knee": 4,
    "epochs": 1,
    "seeds": [0, 1],
    "sweep": [1],
    "start": {"method": "AGVM+SGD", "epochs": 0.5, "set": ["optimizer.params.tau=1"]},
    "methods": {
        "AGVM+SGD": {"type": "AGVMSGD", "lr": 0.01, "params": {"momentum": 0.9}},
        "wild": {"type": "SGD", "lr": 1e30},
        "wilder": {"type": "SGD", "lr": 1e30, "growth": "linear"},
    },
}


def options(tmp_path, **changes):
    path = tmp_path / "study.json"
    path.write_text(json.dumps({**STUDY, **changes}))
    return ["--study", str(path), "--out", str(tmp_path / "out")]


def begin(tmp_path, *arguments, **changes):
    return subprocess.Popen(
        [sys.executable, "launch/study.py", *options(tmp_path, **changes), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "STUDY_OF": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def family(tmp_path):
    """Processes of the study, also those whose parent is gone: they have its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STUDY_OF") == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def launch(tmp_path, *arguments):
    process = begin(tmp_path, *arguments)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_study_goes_on_where_it_was_and_reports_divergence(tmp_path):
    first = launch(tmp_path, "--methods", "AGVM+SGD")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "[4/4]" in first.stdout and "ETA" in first.stdout
    whole = launch(tmp_path)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "4 are done" in whole.stdout and "start " not in whole.stdout and whole.stdout.count("AGVM+SGD batch") == 0
    # At the knee both wild rules have the same rate: that run is made once. Beyond it they differ.
    assert (
        whole.stdout.count("wilder batch 4 lr x1 seed 0: the same run as wild batch 4 lr x1 seed 0, taken from there")
        == 1
    )
    assert whole.stdout.count(": diverged") == 6 and whole.stdout.count("taken from there") == 2
    assert "| wild | NaN | NaN |" in whole.stdout and "| wilder | NaN | NaN |" in whole.stdout
    out = tmp_path / "out"
    assert "NaN" in (out / "study.html").read_text() and (out / "variance-AGVM+SGD.png").exists()
    # Different seeds give different runs, the same seed the same start.
    scores = [
        json.loads((out / "AGVM+SGD" / f"batch-4-lr-x1-seed{seed}" / "metrics.jsonl").read_text().splitlines()[0])[
            "loss"
        ]
        for seed in (0, 1)
    ]
    assert scores[0] != scores[1]


@pytest.mark.parametrize("when", ["before its first process is there", "while runs are under way"])
def test_a_study_that_is_stopped_takes_its_runs_along(tmp_path, when):
    early = when.startswith("before")
    process = begin(tmp_path, "--methods", "AGVM+SGD", epochs=500, **({} if early else {"start": None}))
    deadline = time.monotonic() + 300
    if early:
        assert process.stdout.readline().startswith("start ")
    else:
        while not list((tmp_path / "out" / "AGVM+SGD").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert len(family(tmp_path)) >= 3, "the study, the server that runs are forked from, and at least one run"
    process.terminate()
    assert process.wait(timeout=120) == 143, process.stderr.read()
    while family(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert family(tmp_path) == []


def test_a_slip_is_one_sentence(tmp_path):
    wrong = Script(ROOT / "launch" / "study.py", *options(tmp_path), "--methods", "AGVM", folder=tmp_path)
    assert wrong.wait() == 2 and wrong.stderr.strip().count("\n") == 0
    assert 'method "AGVM" is none of AGVM+SGD, wild, wilder' in wrong.stderr
