"""Param groups by module: found from a detector's attributes, or given by prefixes."""

import pytest
import torch
from torch import nn

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.modeling.detector import build_detector
from engine.optim import detector_modules, module_groups
from engine.optim.modules import describe_modules


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.data_preprocessor = nn.Identity()
        self.backbone = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.neck = nn.Linear(2, 2)
        self.rpn_head = nn.Linear(2, 2)
        self.roi_head = nn.Module()
        self.roi_head.bbox_head = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.roi_head.mask_head = nn.Linear(2, 2)
        self.roi_head.bbox_roi_extractor = nn.Identity()


def names(model, groups):
    of = {id(p): name for name, p in model.named_parameters()}
    return {(g["module"], g.get("weight_decay")): [of[id(p)] for p in g["params"]] for g in groups}


def test_a_detectors_modules_are_its_parts_with_the_roi_head_split():
    assert detector_modules(Detector()) == {
        "backbone": ["backbone"],
        "neck": ["neck"],
        "rpn_head": ["rpn_head"],
        "bbox_head": ["roi_head.bbox_head"],
        "mask_head": ["roi_head.mask_head"],
    }


def test_a_name_taken_twice_keeps_its_path_and_small_parts_join_a_head():
    model = Detector()
    model.roi_head.scale = nn.Parameter(torch.ones(1))
    model.roi_head.mask_roi_extractor = nn.Conv2d(1, 1, 1)
    model.backbone[0] = nn.Conv2d(1, 2000, 1)  # beside which they are small
    model.mask_head = nn.Linear(9, 9)
    model.queries = nn.Parameter(torch.ones(3, 2))
    modules = detector_modules(model)
    assert modules["roi_head.mask_head"] == ["roi_head.mask_head"]
    assert modules["mask_head"] == ["mask_head", "roi_head.mask_roi_extractor"]
    assert modules["bbox_head"] == ["roi_head.bbox_head", "roi_head.scale", "queries"]
    covered = [name for group in module_groups(model) for name in names(model, [group]).popitem()[1]]
    assert sorted(covered) == sorted(name for name, _ in model.named_parameters())


def built(name, **options):
    classes = Classes(("a", "b"), (), (1, 2))
    with torch.device("meta"):
        return build_detector(DetectorConfig(config=name, options=options), classes)


DETR = ["backbone", "neck", "bbox_head", "encoder", "decoder"]


@pytest.mark.parametrize(
    "config, modules",
    [
        ("tiny_dino", DETR),
        ("mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", DETR),
        ("mmdet::detr/detr_r18_8xb2-500e_coco.py", DETR),
        (
            "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py",
            ["backbone", "pixel_decoder", "transformer_decoder", "predictor"],
        ),
        ("mmdet::sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py", ["backbone", "neck", "bbox_head"]),
    ],
)  # fmt: skip
def test_modules_of_transformers_are_large_and_every_parameter_is_in_one(config, modules):
    model = built(config)
    found = detector_modules(model)
    assert list(found) == modules
    assert {group["module"] for group in module_groups(model, found)} <= set(modules)


def test_small_parts_of_dino_belong_to_the_side_they_feed_and_are_shown():
    model = built("tiny_dino")
    modules = detector_modules(model)
    assert modules["encoder"] == ["encoder", "memory_trans_fc", "memory_trans_norm", "level_embed"]
    assert modules["decoder"] == ["decoder", "query_embedding", "dn_query_generator"]
    text = describe_modules(module_groups(model), modules)
    assert "decoder 0.1" in text and "(with query_embedding, dn_query_generator)" in text


def test_one_group_per_module_and_weight_decay_without_frozen_parameters():
    model = Detector()
    model.neck.requires_grad_(False)
    model.backbone[0].weight.requires_grad_(False)
    groups = names(model, module_groups(model, weight_decay=0.1, no_decay=True))
    assert groups["backbone", 0.0] == ["backbone.0.bias", "backbone.1.weight", "backbone.1.bias"]
    assert ("backbone", 0.1) not in groups and not [key for key in groups if key[0] == "neck"]
    assert groups["bbox_head", 0.1] == ["roi_head.bbox_head.0.weight", "roi_head.bbox_head.1.weight"]


def test_a_predicate_may_choose_what_is_not_decayed():
    model = Detector()
    groups = names(model, module_groups(model, no_decay=lambda name, p: name.startswith("neck")))
    assert groups["neck", 0.0] == ["neck.weight", "neck.bias"] and ("rpn_head", None) in groups


@pytest.mark.parametrize(
    "modules, words",
    [
        ({"backbone": ["backbone"]}, '"neck.weight" is in none of the modules backbone:'),
        (
            {"all": ["backbone", "neck", "rpn_head", "roi_head"], "mask": ["roi_head.mask_head"]},
            '"roi_head.mask_head.weight" is in modules all, mask:',
        ),
    ],
)
def test_a_parameter_in_no_module_or_in_two_is_named(modules, words):
    with pytest.raises(ValueError, match=words):
        module_groups(Detector(), modules)


def test_a_prefix_ends_at_a_dot():
    model = nn.ModuleDict({"neck": nn.Linear(1, 1), "neck2": nn.Linear(1, 1)})
    groups = names(model, module_groups(model, {"a": ["neck"], "b": ["neck2"]}))
    assert groups["a", None] == ["neck.weight", "neck.bias"]
