"""A dry run: what it prints, its verdict, its exit code, and that it leaves nothing behind."""

import json
import re
import sys
from pathlib import Path

import pytest
from forking import Script
from tiny_run import merged

from engine.errors import UserError
from engine.planning.dry_run import byte_text
from launch import train

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"
AGVM = {"type": "AGVMAdamW", "params": {"lr": 1e-3, "tau": 2, "start_step": 0}}
SPLIT = {"annotations": "annotations.json", "images": "images"}
ON_480 = {"train_batch_size": 960, "train_micro_batch_size_per_gpu": 2}

# Name -> (ranks, changes to the tiny run, exit code, verdict, further lines).
CASES = {
    "runs": (
        480,
        {**ON_480, "optimizer": AGVM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        0,
        "it would run on 480 ranks",
        [
            r"batch +960 = 2 x 1 accumulated x 480 ranks",
            r"AGVM +windows: 1, from step 2 on, every 2",
            r"engine +DeepSpeedZeroOptimizer_Stage3 .* rank 0 of 480 on the meta device; its 48 fragments lie as plan",
            r"  backbone +47.\d+ kB",
            r"  gradients +reduce_scatter +1 ",
            r"  second gradient +reduce_scatter ",
        ],
    ),
    "precision of other devices": (
        6,
        {
            "train_batch_size": 12,
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AGVMLAMB", "params": AGVM["params"]},
        },
        0,
        "it would run on 6 ranks",
        [
            r"engine +DeepSpeedZeroOptimizer ",
            r"  layer norms +all_reduce +1 ",
            r"traffic of a plain step .* float16 gradients",
        ],
    ),
    "missing files": (
        6,
        {
            "train_batch_size": 12,
            "zero_optimization": {"stage": 2},
            "detector": {"load_from": "{folder}/nowhere.pth"},
            "data": {"dataset": "coco", "root": "{folder}/nowhere", "train": SPLIT, "val": SPLIT},
        },
        2,
        "it would stop: annotation file .*nowhere/annotations.json does not exist",
        [
            r"data +not read; .* 117266 training images and 80 classes are assumed",
            r"engine +DeepSpeedZeroOptimizer .* rank 0 of 6",
            r"  gradients +all_reduce ",
            r"later +weight file .*nowhere.pth does not exist",
        ],
    ),
    "used work dir": (
        2,
        {"optimizer": {**AGVM, "params": {**AGVM["params"], "tau": 7}}, "run": {"work_dir": "{folder}/used"}},
        2,
        "it would stop: work dir .*used already holds a run: continue it with --resume",
        [
            r"later +AGVM's first window is step 7 \(tau 7, after start_step 0\) but the run has 3 steps",
            r"shards +ZeRO-0: all of it on every rank",
        ],
    ),
    "one micro-batch": (
        1,
        {"train_batch_size": 1, "optimizer": AGVM},
        2,
        "it would stop: AGVM compares at least two micro-batches per optimizer step, got 1 rank",
        [],
    ),
    "unsupported": (
        4,
        {"optimizer": AGVM, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        2,
        "it would stop: AGVM does not support quantized gradients",
        [],
    ),
    "an odd number of ranks": (
        3,
        {
            "train_batch_size": 6,
            "optimizer": AGVM,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        },
        0,
        "it would run on 3 ranks",
        [r"engine +DeepSpeedZeroOptimizer .* rank 0 of 3 on the meta device; its \d+ fragments lie"],
    ),
    "offloaded": (
        3,
        {
            "train_batch_size": 3,
            "optimizer": AGVM,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        },
        0,
        "it would run on 3 ranks",
        [r"engine +DeepSpeedZeroOptimizer_Stage3 .* on the meta device \(its offloading left out\); its 48 fragments"],
    ),
    "offloaded and one micro-batch": (
        1,
        {
            "train_batch_size": 1,
            "optimizer": AGVM,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        2,
        "it would stop: AGVM compares at least two micro-batches per optimizer step, got 1 rank",
        [],
    ),
    "offloaded in part": (
        2,
        {"optimizer": AGVM, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        2,
        r"it would stop: AGVM does not support partial optimizer offload \(ratio < 1\)",
        [],
    ),
    "offloaded to a disk": (
        2,
        {"optimizer": AGVM, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
        2,
        "it would stop: AGVM does not support parameter offload to NVMe",
        [],
    ),
    "offloaded to no disk": (
        2,
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        2,
        "it would stop: zero_optimization.offload_param to nvme has no nvme_path: give a folder on that disk",
        [],
    ),
    "offloaded without a norm": (
        2,
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "compute_grad_norm": False}},
        2,
        r"it would stop: DeepSpeed does not accept this config \(zero_optimization.compute_grad_norm=false does not",
        [],
    ),
    "sharpness": (
        2,
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}, "sam": {"rho": 0.05}}, "fp16": {"enabled": True}},
        2,
        "it would stop: SAM does not support fp16 at stage 0",
        [],
    ),
    "batch": (
        3,
        {"train_batch_size": 16},
        2,
        "it would stop: train_batch_size 16 cannot be divided by micro-batch 1 x 3 ranks = 3: use 15 or 18",
        [],
    ),
    "no ranks": (0, {}, 2, "it would stop: --world-size must be at least 1, got 0", []),
}


def options(folder, name, *further):
    ranks, changes, *_ = CASES[name]
    changes = json.loads(json.dumps(changes).replace("{folder}", str(folder)))
    changes.setdefault("run", {}).setdefault("work_dir", str(folder / "work" / name))
    config = folder / f"{name}.json"
    config.write_text(json.dumps(merged(changes)))
    return ["--deepspeed_config", str(config), "--dry-run", "--world-size", str(ranks), *further]


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_names_the_first_thing_that_would_fail(tmp_path, monkeypatch, capsys, name):
    _, _, code, verdict, lines = CASES[name]
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("{}\n")
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    assert train.dry_run_code(train.train_arguments().parse_args(options(tmp_path, name))) == code
    printed = capsys.readouterr().out
    assert re.match(f"verdict {verdict}", printed.splitlines()[-1]), printed
    for line in lines:
        assert re.search(f"^{line}", printed, re.MULTILINE), (line, printed)
    assert not (tmp_path / "work").exists()  # nothing was made
    assert [entry.name for entry in (tmp_path / "used").iterdir()] == ["metrics.jsonl"]


def test_in_a_process_of_its_own_it_ends_with_the_verdict_and_writes_the_layout(tmp_path):
    done = Script(TRAIN, *options(tmp_path, "an odd number of ranks", "--layout", "shards.json"), folder=tmp_path)
    assert done.wait() == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == "verdict it would run on 3 ranks"
    written = json.loads((tmp_path / "shards.json").read_text())
    assert (written["stage"], written["world"]) == (2, 3)
    table = dict(re.findall(r"^  (backbone|neck|bbox_head) +([0-9.]+ [kM]B)", done.stdout, re.MULTILINE))
    assert {module: byte_text(4 * sum(counts)) for module, counts in written["elements"].items()} == table
    assert all(len(counts) == 3 for counts in written["elements"].values())


def test_an_engine_that_cannot_be_built_gives_no_clean_verdict(tmp_path, monkeypatch, capsys):
    import deepspeed

    def broken(**_):
        raise RuntimeError("Tensor.item() cannot be called on meta tensors\nmore")

    monkeypatch.setattr(deepspeed, "initialize", broken)
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    assert train.dry_run_code(train.train_arguments().parse_args(options(tmp_path, "an odd number of ranks"))) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "verdict not known: DeepSpeed's engine cannot be built without storage (Tensor.item() cannot be"
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--deepspeed_config", "quickstart", "--world-size", "4"], "--world-size goes with --dry-run"),
        (["--deepspeed_config", "quickstart", "--layout", "x.json"], "--layout goes with --dry-run"),
        (
            ["--deepspeed_config", "quickstart", "--dry-run", "--resume"],
            "--dry-run is for a new run: leave --resume out",
        ),
    ],
)
def test_arguments_that_do_not_go_together(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as end:
        train.main()
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_a_layout_that_cannot_be_written_is_told_first(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for file, words in (
        ("/dev/null/x", "the folder of --layout /dev/null cannot be written: File exists"),
        (str(tmp_path), f"--layout is the file to write, got the folder {tmp_path}"),
    ):
        with pytest.raises(UserError, match=words):
            train.dry_run_code(train.train_arguments().parse_args(options(tmp_path, "runs", "--layout", file)))
