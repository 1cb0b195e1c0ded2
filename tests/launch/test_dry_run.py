"""A dry run in a process of its own: what it prints, its verdict, its exit code, and that it leaves nothing behind."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_run import merged

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"
AGVM = {"type": "AGVMAdamW", "params": {"lr": 1e-3, "tau": 2, "start_step": 0}}
SPLIT = {"annotations": "annotations.json", "images": "images"}
ON_480 = {"train_batch_size": 960, "train_micro_batch_size_per_gpu": 2}

# Name -> (ranks, changes to the tiny run, exit code, verdict, further lines).
CASES = {
    "runs": (480, {**ON_480, "optimizer": AGVM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, 0,
             "it would run on 480 ranks",
             [r"batch +960 = 2 x 1 accumulated x 480 ranks", r"AGVM +windows: 1, from step 2 on, every 2",
              r"engine +DeepSpeedZeroOptimizer_Stage3 .* as rank 0 of 480 on the meta device; its 82 fragments lie as planned",
              r"  backbone +706.\d+ kB", r"  gradients +reduce_scatter +1 ", r"  second gradient +reduce_scatter "]),
    "precision of other devices": (
        6, {"train_batch_size": 12, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AGVMLAMB", "params": AGVM["params"]}}, 0, "it would run on 6 ranks",
        [r"engine +DeepSpeedZeroOptimizer ", r"  layer norms +all_reduce +1 ", r"traffic of a plain step .* float16 gradients"]),
    "missing files": (6, {"train_batch_size": 12, "zero_optimization": {"stage": 2},
                          "detector": {"load_from": "{folder}/nowhere.pth"},
                          "data": {"dataset": "coco", "root": "{folder}/nowhere", "train": SPLIT, "val": SPLIT}}, 2,
                      "it would stop: annotation file .*nowhere/annotations.json does not exist",
                      [r"data +not read; .* 117266 training images and 80 classes are assumed",
                       r"engine +DeepSpeedZeroOptimizer .* rank 0 of 6", r"  gradients +all_reduce ",
                       r"later +weight file .*nowhere.pth does not exist"]),
    "used work dir": (2, {"optimizer": {**AGVM, "params": {**AGVM["params"], "tau": 7}},
                          "run": {"work_dir": "{folder}/used"}}, 2,
                      "it would stop: work dir .*used already holds a run: go on with it by --resume",
                      [r"later +AGVM's first window is step 7 \(tau 7, after start_step 0\) but the run has 3 steps",
                       r"shards +ZeRO-0: all of it on every rank"]),
    "one micro-batch": (1, {"train_batch_size": 1, "optimizer": AGVM}, 2,
                        "it would stop: AGVM compares at least two micro-batches per optimizer step, got 1 rank", []),
    "unsupported": (4, {"optimizer": AGVM, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, 2,
                    r"it would stop: (AGVM does not support quantized gradients|DeepSpeed does not accept)", []),
    "batch": (3, {"train_batch_size": 16}, 2,
              "it would stop: train_batch_size 16 cannot be divided by micro-batch 1 x 3 ranks = 3: use 15 or 18", []),
    "no ranks": (0, {}, 2, "it would stop: --world-size must be at least 1, got 0", []),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text("{}\n")

    def start(name):
        ranks, changes, *_ = CASES[name]
        changes = json.loads(json.dumps(changes).replace("{folder}", str(folder)))
        changes.setdefault("run", {}).setdefault("work_dir", str(folder / "work" / name))
        config = folder / f"{name}.json"
        config.write_text(json.dumps(merged(changes)))
        return run(["--deepspeed_config", str(config), "--dry-run", "--world-size", str(ranks)], folder)

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(CASES, pool.map(start, CASES)))
    assert not (folder / "work").exists()  # nothing was made
    assert [entry.name for entry in (folder / "used").iterdir()] == ["metrics.jsonl"]
    return results


def run(arguments, folder):
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {**{k: v for k, v in os.environ.items() if k not in dropped}, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(TRAIN), *arguments], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_the_first_thing_that_would_fail(outcomes, name):
    _, _, code, verdict, lines = CASES[name]
    done = outcomes[name]
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code
    assert re.match(f"verdict {verdict}", done.stdout.splitlines()[-1]), done.stdout
    for line in lines:
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), (line, done.stdout)


@pytest.mark.parametrize("arguments, words", [
    (["--deepspeed_config", "quickstart", "--world-size", "4"], "--world-size goes with --dry-run"),
    (["--deepspeed_config", "quickstart", "--dry-run", "--resume"], "--dry-run is for a new run: leave --resume out")])
def test_arguments_that_do_not_go_together(tmp_path, arguments, words):
    done = run(arguments, tmp_path)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
