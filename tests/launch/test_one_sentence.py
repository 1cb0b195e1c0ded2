"""What a user can type or bring: one sentence, before the data is read."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forking import LAUNCHER, environment
from tiny_run import TINY, merged, train_tiny

from models.mmdet_setup import import_mmdet

import_mmdet()

from engine.config.load import apply_override  # noqa: E402
from engine.config.optimizer_names import spelled  # noqa: E402
from engine.config.origin import Origin  # noqa: E402
from engine.errors import ConfigError, UserError, short  # noqa: E402
from engine.optim.registry import OURS, build_optimizer, find_rule  # noqa: E402
from engine.recipes.load import load_config, parse_config  # noqa: E402
from engine.rendezvous import adopt_launcher_environment  # noqa: E402
from engine.tasks.registry import task_of  # noqa: E402
from engine.zero.monitors import check_monitors  # noqa: E402
from engine.zero.processes import import_deepspeed  # noqa: E402
from engine.zero.settings import check_deepspeed  # noqa: E402

LAUNCH = Path(__file__).parents[2] / "launch"
OPTIONS = TINY["detector"]["options"]


def options(**changes):
    return {"detector": {"options": {**OPTIONS, **{key.replace("__", "."): value for key, value in changes.items()}}}}


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"data": {"augmentation": [{"type": "RandomCropp"}]}},
            r'no transform "RandomCropp" \(did you mean "RandomCrop"',
        ),
        ({"data": {"augmentation": [{"type": "RandomCrop"}]}}, r"augmentation\[0\].*\"RandomCrop\".*crop_size"),
        ({"data": {"augmentation": [{"crop_size": 3}]}}, r"augmentation\[0\] must name a transform"),
        ({"data": {"augmentation": [{"type": "RandomFlip", "prob": 7}]}}, r"\"RandomFlip\" cannot be built"),
        (
            options(backbone__depth=50),
            r"neck.in_channels is \[8, 16\], but the backbone \(ResNet, depth 50.*\[32, 64\]",
        ),
        (options(neck__in_channels=[8, 99]), r"neck.in_channels is \[8, 99\].*\[8, 16\] channels"),
        (options(backbone__out_indices=[1]), r"neck.in_channels is \[8, 16\].*out_indices \[1\].*\[16\] channels"),
        (options(neck__out_channels=17), r"bbox_head.in_channels is 16, .* \(FPN, out_channels 17\) .*\[17\]"),
        (options(bbox_head__in_channels=99), r"bbox_head.in_channels is 99, .* \(FPN, out_channels 16\)"),
        ({"data": {"augmentation": [{"type": "PackDetInputs"}]}}, "added by itself: remove it"),
        (
            options(backbone__init_cfg={"type": "Pretrained", "checkpoint": "torchvision://resnet18"}),
            "backbone.init_cfg would load weights by itself: .* detector.load_from",
        ),
        (options(backbone__depth__x=3), '"backbone.depth.x" does not fit the model'),
    ],
)
def test_a_model_or_transform_that_cannot_work_is_told_before_the_data(changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        task_of(parse_config(merged(changes), origin=Origin.USER)).check()
    assert "\n" not in str(caught.value)


def first_pass(changes):
    try:
        train_tiny(changes)
    except UserError as error:
        return str(error)
    return "trained"


def test_what_is_seen_in_the_first_pass_only_is_a_sentence_too(ranks):
    for changes, words in (
        (
            options(bbox_head__anchor_generator__strides=[4]),
            "cannot compute a loss for the first batch .AssertionError",
        ),
        (options(data_preprocessor__pad_size_divisor=0), "for the first batch .ZeroDivisionError"),
        (options(neck__out_channels=0), "cannot be initialised with these options .ZeroDivisionError"),
    ):
        assert re.search(words, ranks.run(first_pass, 1, changes)[0])


def test_what_fits_passes():
    task_of(parse_config(merged({"data": {"augmentation": [{"type": "RandomCrop", "crop_size": [32, 32]}]}}))).check()
    for name in ("quickstart", "shapes_faster_rcnn", "shapes_semantic_fpn"):
        task_of(load_config(name)).check()


@pytest.mark.parametrize(
    "text, words",
    [
        ("[" * 100_000, "nested more than 64 levels deep"),
        ('{"a":' * 80 + "1" + "}" * 80, "nested more than 64 levels deep"),
        ('{"run": {"seed": ' + "9" * 5000 + "}}", "a whole number of 5000 digits"),
        ('{"run": {"seed": 1e999}}', "not finite"),
        ('{"name": "a\\u0000b"}', "NUL"),
        ('{"name": "\\ud800"}', "lone surrogate"),
        ('{"name": "' + "x" * 9000 + '"}', "."),
        ('{"' + "x" * 9000 + '": 1}', "unknown key"),
    ],
)
def test_json_beyond_the_limits(text, words, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(str(tmp_path / "x.json"))
    assert len(str(caught.value)) < 600
    str(caught.value).encode()


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000, '"\\ud800"', "\udcff", "a\0b", "1e999", "NaN"])
def test_an_override_beyond_the_limits(value):
    with pytest.raises(ConfigError) as caught:
        apply_override({}, f"run.seed={value}")
    assert len(str(caught.value)) < 400
    str(caught.value).encode()


@pytest.mark.parametrize(
    "override, words",
    [
        ("steps_per_print=0", "steps_per_print must be a number above 0"),
        ("gradient_predivide_factor=0", "gradient_predivide_factor must be a number above 0"),
        ('data_types={"grad_acum_dtype": "fp32"}', "data_types must be an object such as"),
        ("run.work_dir=~nosuchuser/x", "the home of a user that does not exist"),
        ("optimizer.sam.rho=1e300", "optimizer.sam.rho must be at most"),
        ("name=../x", "name must be a plain file name"),
    ],
)
def test_well_typed_but_insane_values(override, words):
    data = merged({})
    apply_override(data, override)
    with pytest.raises(ConfigError, match=words):
        parse_config(data, origin=Origin.USER)


@pytest.mark.parametrize("name", ["x" * 5000, "~nosuchuser/x", "a\0b"])
def test_a_config_of_an_impossible_name(name):
    with pytest.raises(ConfigError) as caught:
        load_config(name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "changes", [{"params": {"lr": 1e300}}, {"params": {"lr": 0.1, "differentiable": True}},
                {"params": {"lr": 0.1, "weight_decay": {"a": 1}}}, {"paramwise": {"lr_mult": {"backbone": 1e300}}}]
)  # fmt: skip
def test_numbers_that_torch_cannot_compute_with(changes):
    config = parse_config(merged({"optimizer": changes})).optimizer
    with pytest.raises(ConfigError, match="beyond 1e\\+38|refused|must be a number"):
        build_optimizer(config, torch.nn.ModuleDict({"backbone": torch.nn.Linear(1, 1)}), warmup_steps=0)


def test_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TINY).encode())
    assert load_config(str(tmp_path / "x.json")).detector.config == "tiny_retinanet"


@pytest.mark.parametrize("name", ["adamw", "ADAMW", "AdamW", "sgd", "agvmsgd", "pmdlamb", "rmsprop"])
def test_an_optimizer_may_be_written_in_any_case(name):
    config = parse_config(merged({"optimizer": {"type": name}}))
    assert config.optimizer.type.lower() == name.lower() and find_rule(config.optimizer.type)
    assert parse_config(
        {"recipe": "faster_rcnn_r50_agvm_sgd", "train_batch_size": 32, "optimizer": {"type": "agvmsgd"}}
    )


def test_the_list_of_optimizers_is_complete():
    base = torch.optim.Optimizer
    torchs = [n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, base)]
    assert all(spelled(name.upper()) == name for name in [*OURS, *torchs] if name != "Optimizer")


def test_a_monitor_that_cannot_work_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")):
        with pytest.raises(ConfigError, match=f"{block}.enabled is true but the package {package} is not installed"):
            check_monitors({block: {"enabled": True}}, writes=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    for block in ("tensorboard", "csv_monitor"):
        settings = {block: {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "x"}}
        with pytest.raises(ConfigError, match=f"{block}.output_path: .*file/x cannot be written: Not a directory"):
            check_monitors(settings, writes=True)
        check_monitors(settings, writes=False)
        check_monitors({block: {"enabled": True, "output_path": str(tmp_path), "job_name": "y"}}, writes=True)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"communication_data_type": "fp99"}, "accept communication_data_type, which is 'fp99'"),
        ({"flops_profiler": 7}, "accept flops_profiler, which is 7"),
        ({"wall_clock_breakdown": "y"}, "accept wall_clock_breakdown, which is 'y'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "x"}}, '"reduce_bucket_size" in zero_optimization'),
    ],
)
def test_deepspeeds_refusal_is_named_with_its_key(keys, words):
    import_deepspeed()
    with pytest.raises(ConfigError, match=words):
        check_deepspeed({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, **keys})


def without(monkeypatch, name):
    """Unset a variable; what the code sets instead is undone too, for the variable was set before."""
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"RANK": "0"}, "half set: WORLD_SIZE is missing"),
        ({"WORLD_SIZE": "2"}, "half set: RANK is missing"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "half set: MASTER_PORT is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "MASTER_PORT must be from 1"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number"),
    ],
)
def test_half_set_variables_of_a_launcher(variables, words, monkeypatch):
    for name in (*LAUNCHER, "SLURM_NTASKS", "SLURM_PROCID"):
        without(monkeypatch, name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        adopt_launcher_environment()


def test_one_rank_needs_no_launcher(monkeypatch):
    for name in (*LAUNCHER, "SLURM_NTASKS", "SLURM_PROCID"):
        without(monkeypatch, name)
    adopt_launcher_environment()
    assert os.environ["WORLD_SIZE"] == "1" and os.environ["MASTER_PORT"].isdigit()


def test_long_values_are_cut():
    assert len(short("x" * 10**6)) < 150 and short("abc") == "abc" and "\0" not in short("a\0b")


def test_under_torchrun_the_sentence_comes_last(tmp_path):
    (tmp_path / "x.json").write_text('{"train_batch_size": 4,}')
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(LAUNCH / "train.py"), "--deepspeed_config", "x.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if re.search(r"\w", line)][-1]
    assert "error: x.json is not JSON" in last
