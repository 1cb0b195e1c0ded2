"""How many images a plan has: as many as the run, and what cannot be read is told in one sentence."""

from __future__ import annotations

import json

import pytest
from tiny_run import merged

from engine.errors import UserError
from engine.planning.known_data import known_data
from engine.planning.plan import Plan
from engine.recipes.load import parse_config
from engine.tasks.registry import task_of


def _config(**changes):
    return parse_config(merged(changes))


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize("task", ["detection", "panoptic"])
def test_the_embedded_data_set_has_the_images_of_the_run(keep_empty, task):
    # Of 60 images some show no object.
    config = _config(data={"shapes": {"train_images": 60, "val_images": 1}, "keep_empty": keep_empty, "task": task})
    known = known_data(config)
    train, val, classes = task_of(config).build_data()
    assert (known.train, known.val, known.things, known.stuff) == (
        len(train.dataset),
        len(val.dataset),
        len(classes.things),
        len(classes.stuff),
    )
    assert (known.train == 60) == keep_empty
    assert known_data(config, images=7).train == 7


def _files(folder, **changes):
    """A config on two annotation files: three images, of which the second has a box and the third one without."""
    content = {
        "images": [{"id": k, "file_name": f"{k}.jpg", "height": 32, "width": 32} for k in (1, 2, 3)],
        "annotations": [
            {"id": 1, "image_id": 2, "category_id": 1, "bbox": [0, 0, 9, 9]},
            {"id": 2, "image_id": 3, "category_id": 1},
        ],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (folder / "coco.json").write_text(json.dumps({**content, **changes}))
    split = {"annotations": str(folder / "coco.json"), "images": str(folder)}
    return _config(data={"dataset": "coco", "train": split, "val": split})


def test_images_without_a_box_are_not_trained_on(tmp_path):
    assert known_data(_files(tmp_path))[:4] == (1, 3, 1, 0)


def test_files_that_cannot_be_used_are_told(tmp_path):
    with pytest.raises(UserError, match="no image of .*coco.json has an annotated object: set data.keep_empty to true"):
        known_data(_files(tmp_path, annotations=[]))
    config = _files(tmp_path)
    (tmp_path / "coco.json").write_text('{"images": [')
    with pytest.raises(UserError, match="annotation file .*coco.json is not JSON: .* at line 1"):
        known_data(config)


@pytest.mark.parametrize(
    "annotations, name, expected",
    [
        ("objects365/annotations/objects365_train.json", "mine", (638_630, 30_000, "v1")),
        ("objects365/annotations/zhiyuan_objv2_train.json", "mine", (1_742_292, 80_000, "v2")),
        ("objects365v2/train.json", "mine", (1_742_292, 80_000, "v2")),
        ("elsewhere/train.json", "retinanet_o365_v2", (1_742_292, 80_000, "v2")),
        ("elsewhere/train.json", "swinv2_o365", (638_630, 30_000, "v1")),
    ],
)
def test_the_two_versions_of_objects365_are_told_apart(annotations, name, expected):
    split = {"annotations": annotations, "images": "nowhere"}
    known = known_data(_config(name=name, data={"dataset": "coco", "train": split, "val": split}))
    train, val, version = expected
    assert known == (train, val, 365, 0, f"Objects365, {version} assumed")


@pytest.mark.parametrize(
    "task, dataset, keep_empty, expected",
    [
        ("detection", "coco", False, (117_266, 5_000, 80, 0, "COCO 2017")),
        ("detection", "coco", True, (118_287, 5_000, 80, 0, "COCO 2017")),
        ("panoptic", "coco", False, (118_287, 5_000, 80, 53, "COCO 2017")),
        ("semantic", "ade20k", False, (20_210, 2_000, 150, 0, "ADE20K")),
    ],
)
def test_public_data_sets_are_those_of_the_task(task, dataset, keep_empty, expected):
    split = {"annotations": "nowhere/instances_train2017.json", "images": "nowhere"}
    data = {"task": task, "dataset": dataset, "keep_empty": keep_empty, "train": split, "val": split}
    assert known_data(_config(data=data)) == expected


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"communication_data_type": "fp64"}, "DeepSpeed does not accept communication_data_type, which is 'fp64'"),
        ({"data_types": {"grad_accum_dtype": "fp99"}}, "data_types.grad_accum_dtype must be .*, got 'fp99'"),
        ({"timers": 3}, "DeepSpeed does not accept"),
    ],
)
def test_what_deepspeed_refuses_is_not_planned(changes, told):
    with pytest.raises(UserError, match=told):
        Plan(_config(data={"keep_empty": True}, **changes), 4)


def test_offloading_may_be_null():
    plan = Plan(
        _config(data={"keep_empty": True}, zero_optimization={"offload_param": None, "offload_optimizer": None}), 4
    )
    assert plan.way.offload == "none" and not plan.settings(3).offload


def test_a_run_of_less_than_a_step_has_one():
    plan = Plan(_config(data={"keep_empty": True}, schedule={"steps": None, "epochs": 0.004, "warmup_steps": None}), 4)
    assert plan.steps == 1
