"""Which differences between the saved config and the present one let a run go on."""

from __future__ import annotations

import pytest
from tiny_run import merged

from engine.checkpoints.compare import check_config, differences
from engine.errors import CheckpointError
from engine.recipes.load import parse_config


def config(**changes):
    return parse_config(merged(changes)).to_json()


def test_the_same_config_has_no_differences():
    assert differences(config(), config()) == [] and check_config(config(), config()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_optimization": {"stage": 3}},
        {"data": {"workers": 4}},
        {"run": {"log_interval": 3}},
        {"run": {"keep_last": 5}},
        {"tensorboard": {"enabled": False}},
        {"detector": {"checkpoint_activations": ["backbone"]}},
    ],
)
def test_what_does_not_change_the_result_may_change(changes):
    lines = check_config(config(), config(**changes))
    assert len(lines) == 1 and lines[0].startswith("changed, same result")


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"schedule": {"steps": 9}}, "schedule.steps: 3 -> 9"),
        ({"gradient_clipping": 1.0}, "gradient_clipping: None -> 1.0"),
        (
            {"optimizer": {"params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}}},
            "optimizer.params.lr: 0.01 -> 0.1",
        ),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu: 1 -> 2"),
        ({"bf16": {"enabled": True}}, "bf16.enabled: None -> True"),
        ({"data": {"flip": 0.0}}, "data.flip: 0.5 -> 0.0"),
    ],
)
def test_what_changes_the_result_is_said(changes, shown):
    assert check_config(config(), config(**changes)) == [f"changed, from here on   {shown}"]


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"train_batch_size": 8}, "train_batch_size: 4 -> 8"),
        ({"run": {"seed": 4}}, "run.seed: 3 -> 4"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}, "optimizer.type: 'SGD' -> 'AdamW'"),
        ({"data": {"shapes": {"train_images": 11}}}, "data.shapes.train_images: 10 -> 11"),
        ({"detector": {"frozen": ["backbone"]}}, r"detector.frozen: \[\] -> \['backbone'\]"),
        ({"detector": {"config": "uninet_tiny_htcx"}}, "detector.config: 'tiny_retinanet' -> 'uninet_tiny_htcx'"),
    ],
)
def test_another_model_data_order_or_optimizer_is_refused(changes, shown):
    with pytest.raises(CheckpointError, match=f"{shown}.*may not change on --resume.*detector.load_from"):
        check_config(config(), config(**changes))


def test_agvm_does_not_change_its_micro_batch():
    agvm = {"optimizer": {"type": "AGVMSGD", "params": {"lr": 0.01}}}
    with pytest.raises(CheckpointError, match="train_micro_batch_size_per_gpu: 1 -> 2"):
        check_config(config(**agvm), config(**agvm, train_micro_batch_size_per_gpu=2))
