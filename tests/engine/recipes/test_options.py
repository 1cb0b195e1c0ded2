"""Detector options of the user's own beside a recipe's: each wins, in whatever form it is written."""

import json

import pytest

from engine.data.types import Classes
from engine.modeling.detector import model_config
from engine.recipes.filling import explain
from engine.recipes.load import parse_config
from engine.recipes.options import lay_under
from models.mmdet_setup import import_mmdet

import_mmdet()

COCO = Classes(tuple(f"c{i}" for i in range(80)), (), tuple(range(1, 81)))
SWIN, R50, R18 = "faster_rcnn_swin_t_agvm_adamw", "faster_rcnn_r50_agvm_sgd", "faster_rcnn_r18_agvm_sgd"


def parsed(recipe, options):
    """The config, which its saved file repeats, with its options in the same order."""
    config = parse_config(
        {"recipe": recipe, "train_batch_size": 64, "data": {"root": "x"}, "detector": {"options": options}}
    )
    again = parse_config(json.loads(json.dumps(config.to_json())))
    assert again == config and list(again.detector.options) == list(config.detector.options)
    assert explain(again) == explain(config)
    return config


def model_of(recipe, options):
    config = parsed(recipe, options)
    first, second = (model_config(config.detector, COCO) for _ in range(2))
    assert first == second
    return first


@pytest.mark.parametrize(
    "own",
    [
        {"backbone.drop_path_rate": 0.05, "backbone.with_cp": True},
        {"backbone": {"drop_path_rate": 0.05, "with_cp": True}},
        {"backbone": {"drop_path_rate": 0.05, "_delete_": False}, "backbone.with_cp": True},
    ],
    ids=["dotted", "nested", "both"],
)
def test_values_inside_a_dictionary_of_the_recipes(own):
    plain, mine = model_of(SWIN, {}).backbone, model_of(SWIN, own).backbone
    assert plain.type == "SwinTransformer" and plain.drop_path_rate == 0.2 and "with_cp" not in plain
    assert mine == {**plain, "drop_path_rate": 0.05, "with_cp": True}


@pytest.mark.parametrize("own", [{"backbone": {"norm_eval": True}}, {"backbone.norm_eval": True}])
def test_a_dictionary_around_a_dotted_key_of_the_recipes(own):
    assert model_of(R50, {}).backbone.norm_eval is False
    assert model_of(R50, own).backbone == {**model_of(R50, {}).backbone, "norm_eval": True}
    assert model_of(R18, own).backbone == {**model_of(R18, {}).backbone, "norm_eval": True}  # depth 18 stays


@pytest.mark.parametrize("recipe", [SWIN, R50, R18])
def test_a_dictionary_that_replaces_takes_nothing_of_the_recipes(recipe):
    own = {"_delete_": True, "type": "ResNet", "depth": 34, "num_stages": 4, "out_indices": [0, 1, 2, 3]}
    model = model_of(recipe, {"backbone": own})
    assert model.backbone == {key: value for key, value in own.items() if key != "_delete_"}
    assert model.neck.in_channels == model_of(recipe, {}).neck.in_channels


def test_null_takes_a_part_away_and_auto_leaves_it_to_the_recipe():
    assert model_of(R18, {"neck": None}).neck is None
    for own in (
        {"backbone": "auto"},
        {"backbone.drop_path_rate": "auto"},
        {"backbone": {"drop_path_rate": "auto"}},
        "auto",
    ):
        assert model_of(SWIN, own) == model_of(SWIN, {})
    assert model_of(R18, {"backbone": {"depth": "auto", "norm_eval": "auto"}}) == model_of(R18, {})


def test_what_the_recipe_has_no_part_in_stays_as_it_is_written():
    own = {"train_cfg": {"rcnn": {"sampler": {"num": 10}}}, "backbone": {"norm_cfg": {"type": "GN"}}}
    assert lay_under({"backbone.depth": 18, "neck.x": 1}, own) == {
        "backbone.depth": 18,
        "neck.x": 1,
        "train_cfg": own["train_cfg"],
        "backbone.norm_cfg": {"type": "GN"},
    }


def test_own_values_are_told_beside_the_recipes():
    def told(recipe, own):
        return [text.strip() for text in explain(parsed(recipe, own)) if text.startswith("  detector.options.backbone")]

    lines = told(SWIN, {"backbone": {"drop_path_rate": 0.05, "with_cp": True}})
    assert lines[0].endswith("(the recipe's backbone)") and lines[1:] == [
        "detector.options.backbone.drop_path_rate 0.05  (yours, where the recipe has 0.2: the recipe's backbone)",
        "detector.options.backbone.with_cp True  (yours, where the recipe has nothing: the recipe's backbone)",
    ]
    assert told(R50, {"backbone": {"norm_eval": True}}) == [
        "detector.options.backbone.norm_eval True  (yours, where the recipe has False: batch-norm statistics are "
        "trained [the authors' code])"
    ]
    assert (
        told(R18, {"backbone": {"_delete_": True, "type": "ResNet", "depth": 34}})[0]
        == "detector.options.backbone.depth 34  (yours, where the recipe has 18: the recipe's backbone)"
    )
