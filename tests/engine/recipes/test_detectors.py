"""The detectors of the recipes: they build, on every backbone, with the modules that AGVM modulates."""

import pytest
import torch

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.modeling.detector import build_detector, model_config
from engine.optim import detector_modules
from engine.recipes import recipe_names
from engine.recipes.load import parse_config
from models.mmdet_setup import import_mmdet

import_mmdet()

COCO = Classes(tuple(f"c{i}" for i in range(80)), (), tuple(range(1, 81)))
ADE20K = Classes(tuple(f"s{i}" for i in range(150)), (), tuple(range(1, 151)))
PANOPTIC = Classes(tuple(f"c{i}" for i in range(80)), tuple(f"s{i}" for i in range(53)), tuple(range(1, 134)))
MODULES = {
    "retinanet": ["backbone", "neck", "bbox_head"],
    "faster_rcnn": ["backbone", "neck", "rpn_head", "bbox_head"],  # the paper's M of appendix A.3
    "mask_rcnn": ["backbone", "neck", "rpn_head", "bbox_head", "mask_head"],
    "panoptic_fpn": ["backbone", "neck", "rpn_head", "bbox_head", "mask_head", "semantic_head"],
    "semantic_fpn": ["backbone", "neck", "semantic_head"],
    "uninet_g_htcx": ["backbone", "neck", "rpn_head", "bbox_head", "mask_head", "context_head"],
}
MODELS = sorted({name.split("_agvm_")[0]: name for name in recipe_names() if "agvm" in name}.items())
PARAMETERS = {"r18": 11.2, "r50": 23.5, "swin_t": 27.5, "htcx": 1080.2}  # of the backbone, in millions


@pytest.mark.parametrize("model, recipe", MODELS)
def test_a_recipes_detector_has_the_papers_modules(model, recipe):
    config = parse_config({"recipe": recipe, "train_batch_size": 64, "data": {"root": "x"}})
    classes = {"panoptic": PANOPTIC, "semantic": ADE20K}.get(config.data.task, COCO)
    with torch.device("cpu" if "swin" in model else "meta"):  # Swin asks its drop-path rates of a tensor
        detector = build_detector(config.detector, classes)
    backbone = next(name for name in PARAMETERS if model.endswith(name))
    assert sum(p.numel() for p in detector.backbone.parameters()) / 1e6 == pytest.approx(PARAMETERS[backbone], abs=0.1)
    pipeline = next(name for name in MODULES if model.startswith(name))
    assert sorted(detector_modules(detector)) == sorted(MODULES[pipeline])


def test_semantic_fpn_on_swin_is_the_zoos():
    config = parse_config({"recipe": "semantic_fpn_swin_t_adamw", "train_batch_size": 8, "data": {"root": "x"}})
    recipe, zoo = (
        build_detector(detector, ADE20K).state_dict()
        for detector in (config.detector, DetectorConfig(config="semantic_fpn_swin_t"))
    )
    assert {name: value.shape for name, value in recipe.items()} == {name: value.shape for name, value in zoo.items()}


def test_options_that_replace_a_part_do_so_every_time():
    """A run builds its model and then its preprocessor from the same options."""
    config = parse_config({"recipe": "retinanet_swin_t_adamw", "train_batch_size": 8, "data": {"root": "x"}})
    first, second = (model_config(config.detector, COCO) for _ in range(2))
    assert first == second and "depth" not in second.backbone
    assert config.detector.options["backbone"]["_delete_"] is True
