"""A JSON that names a recipe: whose value wins, what is printed, what is refused and in which words."""

import copy
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.load import apply_override
from engine.errors import ConfigError
from engine.recipes import find_recipe, recipe_names
from engine.recipes.filling import explain, fill_recipe
from engine.recipes.load import parse_config

SMALLEST = {"recipe": "faster_rcnn_r50_agvm_sgd", "train_batch_size": 256, "data": {"root": "coco"}}


def changed(*overrides):
    data = copy.deepcopy(SMALLEST)
    for override in overrides:
        apply_override(data, override)
    return data


def refusal(data):
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line(config, key):
    return next(text.strip() for text in explain(config) if text.strip().startswith(f"{key} "))


def test_a_recipe_a_batch_and_a_root_make_a_run():
    config = parse_config(SMALLEST)
    assert config.optimizer.type == "AGVMSGD" and config.optimizer.params == {
        "lr": pytest.approx(0.16 * 2**0.5),
        "weight_decay": 1e-4,
        "momentum": 0.9,
        "tau": 10,
        "alpha": 0.97,
    }
    assert (config.schedule.epochs, config.schedule.warmup_epochs, config.schedule.steps) == (16, 2, None)
    assert config.detector.config == "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py" and config.detector.sync_bn
    assert config.data.train.annotations.endswith("/coco/annotations/instances_train2017.json")
    assert config.detector.load_from.endswith("/weights/resnet50.pth")


def test_every_value_is_printed_with_its_rule():
    config = parse_config(SMALLEST)
    lines = explain(config)
    assert lines[0] == "recipe  faster_rcnn_r50_agvm_sgd at batch 256"
    recipe = find_recipe(config.recipe)
    assert len(lines) == 1 + len(recipe.settings(256)) + len(recipe.files())
    assert line(config, "detector.load_from") == f"detector.load_from {config.detector.load_from}  (the recipe's files)"
    assert line(config, "data.val").endswith(
        f"coco/annotations/instances_val2017.json, {config.data.val.images}  (the recipe's files)"
    )
    assert (
        line(config, "optimizer.params.lr")
        == "optimizer.params.lr 0.2263  (0.04 x 4 x sqrt(2) from batch 32; SGD: linear to 128, square root beyond)"
    )
    assert line(config, "schedule.milestones").endswith("[the authors' code])")
    assert line(parse_config(changed("train_batch_size=64")), "optimizer.params.lr").startswith(
        "optimizer.params.lr 0.08  (0.04 x 2 from batch 32;"
    )


@pytest.mark.parametrize(
    "recipe, batch, product",
    [
        ("faster_rcnn_r50_sgd", 16, "0.04 x 0.5"),
        ("faster_rcnn_r50_sgd", 128, "0.04 x 4"),
        ("faster_rcnn_r50_sgd", 1024, "0.04 x 4 x sqrt(8)"),
        ("faster_rcnn_r50_adamw", 1536, "0.0002 x 4 x sqrt(1.5)^3.585"),
        ("uninet_g_htcx_adamw", 64, "0.00015 x 0.5 x sqrt(1.5)^-2.907"),
        ("uninet_g_htcx_adamw", 1920, "0.00015 x sqrt(1.5)^1"),
    ],
)
def test_the_printed_product_is_the_printed_rate(recipe, batch, product):
    text = line(parse_config(changed(f"recipe={recipe}", f"train_batch_size={batch}")), "optimizer.params.lr")
    assert f"({product} from batch " in text
    rate = float(text.split()[1])
    assert eval(product.replace(" x ", "*").replace("^", "**"), {"sqrt": math.sqrt}) == pytest.approx(rate, rel=1e-3)


USERS = {
    "optimizer.params.lr": 0.3,
    "optimizer.params.tau": 3,
    "optimizer.params.weight_decay": 0.0,
    "schedule.epochs": 5,
    "schedule.warmup_epochs": 0,
    "gradient_clipping": 7.0,
    "detector.sync_bn": False,
    "schedule.milestones": [0.5],
    "optimizer.params.alpha": 0.5,
    "detector.load_from": None,
    "detector.options.backbone.norm_eval": True,
}


@settings(deadline=None)  # a busy machine is no fault
@given(st.dictionaries(st.sampled_from(sorted(USERS)), st.booleans()))
def test_the_users_values_win_and_auto_is_like_leaving_out(own):
    data = changed(*(f"{key}={json.dumps(USERS[key]) if is_own else 'auto'}" for key, is_own in own.items()))
    before = copy.deepcopy(data)
    filled, plain = fill_recipe(data), fill_recipe(SMALLEST)
    assert data == before
    for key, is_own in own.items():
        node, expected = filled, plain
        for part in key.split(".", 2):
            node, expected = node[part], expected[part]
        assert node == (USERS[key] if is_own else expected), key
    config = parse_config(data)
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config  # the saved file repeats the run


def test_the_users_value_is_told_beside_the_rules():
    config = parse_config(changed("optimizer.params.lr=0.38"))
    assert line(config, "optimizer.params.lr").startswith(
        "optimizer.params.lr 0.38  (yours, where the recipe has 0.2263: 0.04 x 4 x sqrt(2)"
    )
    assert explain(parse_config(json.loads(json.dumps(config.to_json())))) == explain(config)


def test_files_of_ones_own_are_told_beside_the_recipes():
    split = {"annotations": "/a.json", "images": "/i"}
    config = parse_config({**SMALLEST, "data": {"train": split, "val": split}, "detector": {"load_from": None}})
    assert (
        line(config, "detector.load_from")
        == "detector.load_from left out  (yours, where the recipe has weights/resnet50.pth)"
    )
    assert line(config, "data.train") == (
        "data.train /a.json, /i  (yours, where the recipe has annotations/instances_train2017.json, train2017)"
    )


@pytest.mark.parametrize(
    "own, expected",
    [
        ({"epochs": "auto", "steps": 10}, (10, None, None, 2)),
        ({"epochs": "auto", "steps": "auto"}, (None, 16, None, 2)),
        ({"epochs": 3, "steps": "auto", "warmup_epochs": "auto", "warmup_steps": 4}, (None, 3, 4, None)),
    ],
)
def test_auto_beside_the_other_length_asks_for_nothing(own, expected):
    schedule = parse_config({**SMALLEST, "schedule": own}).schedule
    assert (schedule.steps, schedule.epochs, schedule.warmup_steps, schedule.warmup_epochs) == expected


def test_steps_of_ones_own_replace_the_recipes_epochs_and_so_for_the_warm_up():
    config = parse_config(changed("schedule.steps=90", "schedule.warmup_steps=5"))
    assert (config.schedule.steps, config.schedule.epochs) == (90, None)
    assert (config.schedule.warmup_steps, config.schedule.warmup_epochs) == (5, None)
    config = parse_config(changed("schedule.steps=null", "schedule.warmup_steps=null"))
    assert (config.schedule.epochs, config.schedule.warmup_epochs) == (16, 2)


def test_ones_own_data_is_not_mixed_with_cocos():
    split = {"annotations": "/a.json", "images": "/i"}
    assert "data.val is missing" in refusal({**SMALLEST, "data": {"train": split}})
    config = parse_config({**SMALLEST, "data": {"dataset": "shapes"}})
    assert config.data.train is None and config.data.task == "detection"
    config = parse_config({**SMALLEST, "recipe": "uninet_g_htcx_adamw", "data": {"dataset": "shapes"}})
    assert (config.data.task, config.data.scale, config.data.train_scales) == ("instance", [1333, 800], None)
    assert [text.split()[0] for text in explain(config) if text.startswith("  data.")] == ["data.task", "data.dataset"]
    assert parse_config({**SMALLEST, "data": {"train": split, "val": split}}).data.train.images == "/i"


def test_ones_own_model_takes_neither_options_nor_weights_of_the_recipes():
    config = parse_config(changed("detector.config=tiny_retinanet", 'detector.options={"backbone.depth": 50}'))
    assert config.detector.options == {"backbone.depth": 50} and config.detector.load_from is None
    assert not config.detector.sync_bn and config.optimizer.params["tau"] == 10
    told = [text for text in explain(config) if text.startswith("  detector.")]
    assert len(told) == 1 and "yours, where the recipe has mmdet::faster_rcnn" in told[0]


def test_the_saved_config_repeats_the_run_and_says_its_recipe():
    config = parse_config(SMALLEST)
    assert config.to_json()["recipe"] == SMALLEST["recipe"]
    assert "recipe" not in parse_config({**config.to_json(), "recipe": None}).to_json()


@pytest.mark.parametrize(
    "override, sentence",
    [
        (
            "recipe=faster_rcnn_r50_agvm_sdg",
            'there is no recipe "faster_rcnn_r50_agvm_sdg" (did you mean "faster_rcnn_r50_agvm_sgd"?): '
            "docs/recipes.md lists them",
        ),
        ("recipe=zzz", 'there is no recipe "zzz": docs/recipes.md lists them'),
        ("recipe=7", "recipe must be the name of one, such as retinanet_r18_agvm_sgd, got 7"),
        (
            "recipe=semantic_fpn_swin_t_sgd",
            'there is no recipe "semantic_fpn_swin_t_sgd" (did you mean "semantic_fpn_swin_t_adamw"?): '
            "docs/recipes.md lists them",
        ),
        (
            "train_batch_size=auto",
            'recipe "faster_rcnn_r50_agvm_sgd" follows train_batch_size, which must be a whole number >= 1: '
            "got 'auto'",
        ),
        (
            "train_batch_size=0",
            'recipe "faster_rcnn_r50_agvm_sgd" follows train_batch_size, which must be a whole number >= 1: got 0',
        ),
        (
            "train_batch_size=null",
            'recipe "faster_rcnn_r50_agvm_sgd" follows train_batch_size, which must be a whole number >= 1: '
            "it is not given",
        ),
        (
            "schedule.power=auto",
            'schedule.power is "auto" but recipe "faster_rcnn_r50_agvm_sgd" has no value for it: give one',
        ),
        (
            "optimizer.type=AdamW",
            'recipe "faster_rcnn_r50_agvm_sgd" trains with AGVMSGD but optimizer.type is "AdamW": leave the '
            'type out, or name another recipe (did you mean "faster_rcnn_r50_adamw"?)',
        ),
        (
            "optimizer.params.foo=auto",
            'optimizer.params.foo is "auto" but recipe "faster_rcnn_r50_agvm_sgd" has no value for it: give one',
        ),
        ("optimizer=3", "optimizer must be an object, got 3"),
        ("schedule=[]", "schedule must be an object, got []"),
        ("recipie=x", 'unknown key "recipie" (did you mean "recipe"?)'),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_sentence(override, sentence):
    assert refusal(changed(override)) == sentence


def test_the_ablations_of_the_page_are_as_it_writes_them():
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    table = page.split("| the paper's ablation |")[1].split("\n\n")[0]
    overrides = [text.strip("'") for text in re.findall(r"`([^`]+=[^`]+)`", table)]
    assert len(overrides) == 8
    config = parse_config(changed("recipe=mask_rcnn_r50_agvm_sgd", *overrides))
    assert config.detector.ablation.model_dump() == {"no_fpn": True, "independent_heads": True, "ignored_pixels": 0.75}
    assert config.detector.options["train_cfg.rcnn.sampler.num"] == 10 and config.detector.frozen == [
        "roi_head.bbox_head"
    ]
    assert [config.optimizer.params[key] for key in ("anchor", "tau", "alpha")] == ["neck", 20, 0.98]


@pytest.mark.parametrize(
    "key", ["optimizer.params.lr", "schedule.epochs", "detector.config", "data.task", "gradient_clipping"]
)
def test_auto_without_a_recipe_is_refused(key):
    full = parse_config(SMALLEST).to_json()
    del full["recipe"]
    apply_override(full, f"{key}=auto")
    assert refusal(full) == f'{key} is "auto" but no recipe is named: give a value, or a "recipe" (docs/recipes.md)'


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("batch", [1, 100, 8192])
def test_every_recipe_makes_a_valid_config_at_any_batch(name, batch):
    config = parse_config({**SMALLEST, "recipe": name, "train_batch_size": batch})
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config
