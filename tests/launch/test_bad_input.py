"""Bad input in real processes: one sentence, exit code 2, no traceback, on every rank."""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forking import Script, environment
from tiny_run import merged

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = ["train", "evaluate", "infer"]
SPLIT = {"annotations": "annotations.json", "images": "images"}
COCO = {"dataset": "coco", "train": SPLIT, "val": SPLIT}
IMAGE = {"id": 3, "file_name": "3.png", "height": 64, "width": 64}
BOX = {"image_id": 3, "category_id": 1, "bbox": [4, 4, 30, 30]}
CATEGORIES = [{"id": 1, "name": "cell"}]

# Name -> (what the sentence says, the config: text as it stands, or changes to the tiny run).
ONE_PROCESS = {
    "malformed json": ("is not JSON: Expecting property name", '{"train_batch_size": 4,}'),
    "unknown key": (
        r'unknown key "schedule.warmup_step" \(did you mean "warmup_steps"\?\)',
        {"schedule": {"warmup_step": 3}},
    ),
    "wrong type": ("run.seed must be a whole number, got 'one'", {"run": {"seed": "one"}}),
    "batch triangle": (
        "train_batch_size 5 cannot be divided by micro-batch 2 x 1 ranks = 2: use 4 or 6",
        {"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2},
    ),
    "empty data set": ("annotations.json lists no images", {"data": {**COCO, "root": "{folder}/empty"}}),
    "no masks": (
        'data.task is "instance" but .* has no masks',
        {"data": {**COCO, "root": "{folder}/boxes", "task": "instance"}},
    ),
    "no class maps": (
        "folder .*boxes/maps does not exist: check data.root and the split's annotations",
        {
            "detector": {"config": "tiny_semantic_fpn", "options": {}},
            "data": {
                "dataset": "ade20k",
                "task": "semantic",
                "root": "{folder}/boxes",
                "train": {"images": "images", "annotations": "maps"},
                "val": {"images": "images", "annotations": "maps"},
            },
        },
    ),
    "used work dir": (
        "used already holds a run: continue it with --resume, or start a new run",
        {"run": {"work_dir": "{folder}/used"}},
    ),
    "unknown detector": (
        r'detector.config "tiny_retinanett" is not .* \(did you mean "tiny_retinanet"\?\)',
        {"detector": {"config": "tiny_retinanett"}},
    ),
    "empty load_from": ("detector.load_from is empty: name a weight file", {"detector": {"load_from": ""}}),
    "unwritable work dir": (
        "boxes/annotations.json/x cannot be written: ",
        {"run": {"work_dir": "{folder}/boxes/annotations.json/x"}},
    ),
}
TORCHRUN = {
    "malformed json": ONE_PROCESS["malformed json"],
    "class mismatch": (
        r"bbox_head.retina_cls.bias is \(999,\) in the file and .*another number of classes",
        {"detector": {"load_from": "{folder}/other.pth"}},
    ),
}
TWO_RANKS = {
    "missing file": (
        "nowhere/annotations.json does not exist: check data.root",
        {"data": {**COCO, "root": "{folder}/nowhere"}},
    ),
    "class mismatch": TORCHRUN["class mismatch"],
    # Only one rank of a node looks at the images.
    "wrong size": (
        "3.png has 64 x 64 pixels, but .*annotations.json says 64 x 60",
        {"data": {**COCO, "root": "{folder}/sizes"}},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import cv2
    import numpy as np
    import torch

    path = tmp_path_factory.mktemp("bad")
    for name, content in {
        "empty": {"images": [], "annotations": [], "categories": CATEGORIES},
        "boxes": {"images": [IMAGE], "annotations": [BOX], "categories": CATEGORIES},
        "sizes": {"images": [{**IMAGE, "height": 60}], "annotations": [BOX], "categories": CATEGORIES},
    }.items():
        (path / name / "images").mkdir(parents=True)
        (path / name / "annotations.json").write_text(json.dumps(content))
    for name in ("boxes", "sizes"):
        cv2.imwrite(str(path / name / "images" / "3.png"), np.zeros((64, 64, 3), np.uint8))
    (path / "used").mkdir()
    (path / "used" / "metrics.jsonl").write_text("{}\n")
    torch.save(
        {"bbox_head.retina_cls.bias": torch.zeros(999), "backbone.conv1.weight": torch.zeros(8, 3, 7, 7)},
        path / "other.pth",
    )
    return path


def arguments(folder, name, content):
    """Of launch/train.py for one case, with a config file and a work dir of its own."""
    if isinstance(content, dict):
        changes = json.loads(json.dumps(content).replace("{folder}", str(folder)))
        content = json.dumps(merged(changes, merged({"run": {"work_dir": str(folder / f"run {name}")}})))
    path = folder / f"{name}.json"
    path.write_text(content)
    return [str(LAUNCH / "train.py"), "--deepspeed_config", str(path)]


def under_torchrun(folder, name, content):
    """Launcher's exit code and what each rank wrote: torchrun itself always ends with a traceback of its own."""
    logs = folder / f"logs {name}"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--redirects", "3", "--log-dir", str(logs)]
    command = [sys.executable, *launcher, *arguments(folder, f"torchrun {name}", content)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, timeout=240)
    return done.returncode, [next(logs.glob(f"*/attempt_0/{rank}/stderr.log")).read_text() for rank in (0, 1)]


def two_by_hand(folder, name, content):
    """Exit code and stderr of each of two ranks that no launcher ends early, and how long they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = arguments(folder, name, content)
    began = time.monotonic()
    where = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [Script(*command, folder=folder, RANK=str(r), LOCAL_RANK=str(r), **where) for r in (0, 1)]
    return [(rank.wait(), rank.stderr) for rank in ranks], time.monotonic() - began


def assert_one_sentence(stderr, words):
    assert "Traceback" not in stderr
    errors = re.findall(r"^error: .*", stderr, re.MULTILINE)
    assert len(errors) == 1, stderr
    assert re.search(words, errors[0]), errors[0]


EXPECTED = {
    **{name: words for name, (words, _) in ONE_PROCESS.items()},
    "missing config": 'config "nowhere.json" is neither a file nor one of the shipped ones',
    "missing checkpoint": "weight file nowhere.pth does not exist",
    "empty --load-from": "detector.load_from is empty: name a weight file",
}


COMMANDS = {
    "empty --load-from": ["train.py", "--deepspeed_config", "quickstart", "--load-from", ""],
    "missing config": ["train.py", "--deepspeed_config", "nowhere.json"],
    "missing checkpoint": ["evaluate.py", "nowhere.pth"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_single_process_says_one_sentence_and_exits_with_2(folder, name):
    if name in COMMANDS:
        script, *rest = COMMANDS[name]
        command = [LAUNCH / script, *rest]
    else:
        command = arguments(folder, name, ONE_PROCESS[name][1])
    process = Script(*command, folder=folder)
    assert process.wait() == 2
    assert_one_sentence(process.stderr, EXPECTED[name])
    if name == "used work dir":  # nothing is changed in it
        assert [p.name for p in (folder / "used").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["malformed json", pytest.param("class mismatch", marks=pytest.mark.exhaustive)])
def test_under_torchrun_one_rank_speaks_and_none_shows_a_traceback(folder, name):
    words, content = TORCHRUN[name]
    code, (first, second) = under_torchrun(folder, name, content)
    assert code != 0
    assert_one_sentence(first, words)
    assert "error: " not in second and "Traceback" not in second


@pytest.mark.parametrize("name", TWO_RANKS)
def test_every_rank_exits_with_2_within_seconds(folder, name):
    words, content = TWO_RANKS[name]
    ((first_code, first), (second_code, second)), seconds = two_by_hand(folder, name, content)
    assert (first_code, second_code) == (2, 2)
    assert_one_sentence(first, words)
    assert "error: " not in second and "Traceback" not in second
    assert seconds < 90  # far below the half hour that a rank alone in a collective would wait


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches_with_examples(script, tmp_path):
    done = subprocess.run(
        [sys.executable, str(LAUNCH / f"{script}.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(COLUMNS="200"),
        check=True,
    )
    assert re.search(rf"^  (python|deepspeed).* launch/{script}\.py \S+", done.stdout, re.MULTILINE)
    options = re.findall(r"^  (--[a-z][a-z_-]*)", done.stdout, re.MULTILINE)
    assert "--deepspeed_config" in options and "--set" in options
    for option in options:  # each with a word on what it does
        assert re.search(rf"^  {option}\b.*?\s{{2,}}\w|^  {option}\b.*\n\s{{10,}}\w", done.stdout, re.MULTILINE), option
    assert done.stderr == ""


def test_an_unknown_argument_is_refused_by_every_script(tmp_path):
    for script in SCRIPTS:
        done = subprocess.run(
            [sys.executable, str(LAUNCH / f"{script}.py"), "--no-such-thing"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr and "error: " in done.stderr
