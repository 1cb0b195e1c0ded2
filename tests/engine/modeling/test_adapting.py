"""mmdet's model dictionaries fitted to the data: heads, class weights, padding, no downloads, refusals in words."""

import importlib.util

import pytest

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.modeling import adapting
from engine.modeling.detector import build_detector, dropped_weights, model_config
from engine.modeling.start_weights import start_warnings

THREE = Classes(("a", "b", "c"), (), (1, 2, 3))
WITH_STUFF = Classes(("a", "b", "c"), ("sky", "sea"), (1, 2, 3, 4, 5))


def configured(name, classes=THREE, **options):
    return model_config(DetectorConfig(config=f"mmdet::{name}", options=options), classes)


def test_class_weights_have_one_entry_for_each_class_and_one_for_none():
    mask2former = "mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py"
    head = configured(mask2former, WITH_STUFF).panoptic_head
    assert (head.num_things_classes, head.num_stuff_classes) == (3, 2)
    assert head.loss_cls.class_weight == [1.0] * 5 + [0.1]
    assert configured(mask2former).panoptic_head.loss_cls.class_weight == [1.0] * 3 + [0.1]


def test_weights_of_single_classes_are_not_guessed():
    head = dict(type="Head", num_classes=2, loss_cls=dict(class_weight=[1.0, 2.0, 0.1]))
    with pytest.raises(ConfigError, match="gives each of 2 classes its own weight, but the data has 3"):
        adapting.adapt(dict(type="Detector", backbone={}, bbox_head=head), THREE, "mine", None)


def test_images_are_padded_to_what_the_neck_needs():
    assert configured("rtmdet/rtmdet_tiny_8xb32-300e_coco.py").data_preprocessor.pad_size_divisor == 32
    cornernet = "cornernet/cornernet_hourglass104_8xb6-210e-mstest_coco.py"
    assert configured(cornernet).data_preprocessor.pad_size_divisor == 128
    assert "pad_size_divisor" not in configured("ssd/ssd300_coco.py").data_preprocessor or (
        configured("ssd/ssd300_coco.py").data_preprocessor.pad_size_divisor == 1
    )


def test_batch_augmentations_follow_the_step_and_fixed_sizes_are_dropped():
    (resize,) = configured("yolox/yolox_tiny_8xb8-300e_coco.py").data_preprocessor.batch_augments
    assert resize["type"] == "StepRandomResize" and resize["interval"] == 10
    lsj = configured("atss/atss_r18_fpn_8xb8-amp-lsj-200e_coco.py")
    assert lsj.data_preprocessor.batch_augments is None
    crowd = configured("crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py")
    assert crowd.data_preprocessor.batch_augments is None


@pytest.mark.parametrize(
    "init",
    [
        dict(type="Pretrained", checkpoint="torchvision://resnet50"),
        dict(checkpoint="https://example.org/pvt.pth"),  # as pvt's configs have it
        [dict(type="Kaiming", layer="Conv2d"), dict(type="Pretrained", checkpoint="open-mmlab://resnet50")],
    ],
)
def test_nothing_is_downloaded_and_what_was_dropped_is_known(init):
    model = dict(backbone=dict(init_cfg=init), teacher_ckpt="https://example.org/teacher.pth")
    source = init[-1]["checkpoint"] if isinstance(init, list) else init["checkpoint"]
    assert adapting.drop_downloads(model) == ["teacher: https://example.org/teacher.pth", f"backbone: {source}"]
    assert model["teacher_ckpt"] is None
    kept = [dict(type="Kaiming", layer="Conv2d")] if isinstance(init, list) else None
    assert model["backbone"].get("init_cfg") == kept


def test_weights_in_options_are_refused_before_they_are_fetched():
    init = {"type": "Pretrained", "checkpoint": "torchvision://resnet18"}
    with pytest.raises(ConfigError, match="detector.options.backbone.init_cfg would load weights by itself"):
        configured("retinanet/retinanet_r18_fpn_1x_coco.py", **{"backbone.init_cfg": init})


@pytest.mark.parametrize(
    "name, words",
    [
        ("fast_rcnn/fast-rcnn_r50_fpn_1x_coco.py", "takes proposals from a file"),
        ("glip/glip_atss_swin-t_a_fpn_dyhead_pretrain_obj365.py", "is trained with a text for every image"),
        (
            "soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py",
            "images that have no annotations",
        ),
        ("paa/paa_r50_fpn_1x_coco.py", r"needs the package scikit-learn \(for PAAHead\)"),
        ("misc/d2_retinanet_r50-caffe_fpn_ms-90k_coco.py", "needs the package detectron2"),
        ("convnext/mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py", "needs the package mmpretrain"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(monkeypatch, name, words):
    found = importlib.util.find_spec
    lacking = ("sklearn", "detectron2", "mmpretrain")
    monkeypatch.setattr(importlib.util, "find_spec", lambda m, *a: None if m in lacking else found(m, *a))
    if "convnext" in name and found("mmpretrain") is not None:
        pytest.skip("mmpretrain is installed")
    with pytest.raises(ConfigError, match=words) as caught:
        configured(name)
    assert "\n" not in str(caught.value)


def test_recomputed_layers_of_an_encoder_name_their_package(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda m, *a: None if m == "fairscale" else found(m, *a))
    with pytest.raises(ConfigError, match="needs the package fairscale"):
        configured("dino/dino-4scale_r50_8xb2-12e_coco.py", **{"encoder.num_cp": 6})


def test_frozen_random_layers_are_named_with_the_weights_that_were_dropped():
    config = DetectorConfig(config="mmdet::retinanet/retinanet_r18_fpn_1x_coco.py")
    assert dropped_weights(config) == ["backbone: torchvision://resnet18"]
    assert dropped_weights(config.model_copy(update={"load_from": "weights.pth"})) == []
    model = build_detector(config, THREE)
    random, frozen = start_warnings(model, dropped_weights(config), [])
    assert "torchvision://resnet18" in random and "detector.load_from" in random
    assert "frozen and random" in frozen and "backbone.conv1.weight" in frozen
    assert '"backbone.frozen_stages": -1, "backbone.norm_eval": false' in frozen
    assert start_warnings(model, [], [name for name, _ in model.named_parameters()]) == []


def test_a_teacher_is_sized_like_its_pupil_and_filled_from_a_file(tmp_path):
    import torch

    name, small = "ld/ld_r18-gflv1-r101_fpn_1x_coco.py", {"teacher_config.model.backbone.depth": 50}
    config = DetectorConfig(config=f"mmdet::{name}", options=small).from_user()  # a teacher is a file of its own
    assert [place.split(":")[0] for place in dropped_weights(config)] == ["teacher", "backbone"]
    model = build_detector(config, THREE)
    assert model.teacher_model.bbox_head.num_classes == model.bbox_head.num_classes == 3
    filled = {key: torch.full_like(value, 0.5) for key, value in model.teacher_model.state_dict().items()}
    torch.save(filled, tmp_path / "teacher.pth")
    options = {**small, "teacher_ckpt": str(tmp_path / "teacher.pth")}
    taught = build_detector(config.model_copy(update={"options": options}), THREE)
    assert all(bool((p == 0.5).all()) for p in taught.teacher_model.parameters())
