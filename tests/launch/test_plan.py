"""launch/plan.py as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.planning import time
from engine.planning.hardware import CARDS
from engine.planning.image_sizes import Size
from launch import plan

ROOT = Path(__file__).parents[2]


def _plan(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "plan.py"), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


QUICKSTART = [
    "--deepspeed_config",
    "quickstart",
    "--set",
    "train_batch_size=16",
    "--set",
    "train_micro_batch_size_per_gpu=2",
]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--world-size", "0"], "--world-size must be a whole number >= 1, got 0"),
        (["--world-size", "8", "--gpu", "a100"], 'there is no card "a100" (did you mean'),
        (["--world-size", "8", "--nodes", "3"], "--nodes must divide --world-size 8, got 3"),
        (["--world-size", "7"], "train_batch_size 16 is not micro-batch 2 x accumulation 1 x 7 ranks"),
        (["--world-size", "8", "--measured-step", "1", "--calibrate", "x"], "both say how fast the card is: give one"),
        (["--world-size", "8", "--image-size", "big"], "--image-size is WIDTHxHEIGHT in pixels"),
        (["--world-size", "8", "--calibrate", "nowhere"], "--calibrate nowhere: there is no metrics.jsonl in it"),
        (["--world-size", "8", "--out", "/dev/null/plans"], "--out /dev/null/plans cannot be written: Not a directory"),
        (["--world-size", "8", "--images", "0"], "--images must be a whole number >= 1, got 0"),
    ],
)
def test_wrong_input_is_told(arguments, told):
    with pytest.raises(UserError) as error:
        plan.plan_run(plan.arguments().parse_args([*QUICKSTART, *arguments]))
    assert told in str(error.value)


def test_a_wrong_card_ends_the_script_with_one_sentence():
    done = _plan(*QUICKSTART, "--world-size", "8", "--gpu", "b200")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith('error: there is no card "b200": give one of a100-80g, ')


def test_a_plan_has_memory_time_scaling_and_files(tmp_path, capsys):
    small = ["--set", "data.shapes.train_images=100", "--set", "data.shapes.val_images=20"]
    options = [*QUICKSTART, *small, "--world-size", "8", "--image-size", "128x128", "--out", str(tmp_path)]
    plan.plan_run(plan.arguments().parse_args(options))
    printed = capsys.readouterr().out
    for part in (
        "model   tiny_retinanet, 3.1M parameters",
        "recommended: ",
        "<- this config",
        "GPU-hours",
        "hours by GPUs and batch size",
    ):
        assert part in printed
    written = json.loads((tmp_path / "plan.json").read_text())
    assert {row["stage"] for row in written["memory"]} == {0, 1, 2, 3}
    assert written["recommended"]["fits"] and written["hours"] > 0
    assert {8, 768, 1024} <= {point["world"] for point in written["scaling"]}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_a_run_whose_data_is_elsewhere_calibrates_with_what_is_given(tmp_path, monkeypatch):
    """The number of images and the size of the planned run hold for the calibrating one too."""
    split = {"annotations": "nowhere.json", "images": "nowhere"}
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "detector": {"config": "tiny_retinanet"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "data": {"train": split, "val": split},
        "schedule": {"epochs": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.5}\n')
    seen = []
    monkeypatch.setattr(time, "calibrated", lambda *arguments: seen.append(arguments))
    given = dict(images=10, classes=3, objects=4, fixed_size=Size(64, 96))
    time.calibrate_from_run(str(tmp_path), CARDS["a100-80g"], **given)
    ((planned, _, seconds),) = seen
    assert (planned.world, planned.data.train, planned.data.things, planned.objects) == (2, 10, 3, 4)
    assert planned.sizes.mean == Size(64, 96) and seconds == 0.5
