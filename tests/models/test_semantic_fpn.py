"""Semantic FPN: its loss and its maps by hand, every backbone builds and runs, and padding does not show."""

import pytest
import torch
import torch.nn.functional as F

from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.registry import MODELS  # noqa: E402
from mmdet.structures import DetDataSample  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402

from engine.config.schema import DetectorConfig  # noqa: E402
from engine.data.types import Classes  # noqa: E402
from engine.modeling.detector import build_detector, model_config  # noqa: E402
from engine.optim.modules import detector_modules  # noqa: E402

CLASSES = Classes(tuple("abcdefg"), (), tuple(range(1, 8)))
STUFF = Classes(tuple("abcde"), ("f", "g"), tuple(range(1, 8)))


def head(**options):
    torch.manual_seed(0)
    return MODELS.build(
        dict(
            type="SemanticFPNHead",
            num_classes=7,
            in_channels=8,
            inner_channels=16,
            dropout=0.0,
            norm_cfg=dict(type="GN", num_groups=4),
            **options,
        )
    )


def levels(size=(32, 64)):
    torch.manual_seed(1)
    return [torch.randn(2, 8, size[0] // s, size[1] // s) for s in (4, 8, 16, 32)]


def test_every_level_is_enlarged_to_the_finest_and_summed():
    module = head()
    assert module(levels()).shape == (2, 7, 8, 16)
    # One convolution at strides 4 and 8, two at 16, three at 32, as published.
    assert [len(scale.conv) for scale in module.scales] == [1, 1, 2, 3]
    merged = 0
    for number, (scale, level) in enumerate(zip(module.scales, levels())):
        for conv in scale.conv:
            level = conv(level)
            if number:
                level = F.interpolate(level, scale_factor=2, mode="bilinear", align_corners=False)
        merged = merged + level
    torch.testing.assert_close(module(levels()), module.conv_logits(merged))
    for number in range(4):
        changed = levels()
        changed[number] = changed[number] + 1
        assert not torch.equal(module(changed), module(levels())), f"level {number} has no say"


def test_the_loss_is_the_mean_over_pixels_with_a_class():
    module = head(loss_weight=0.5)
    logits, labels = torch.randn(2, 7, 8, 8), torch.randint(0, 7, (2, 8, 8))
    labels[0, :3], labels[1] = 255, torch.where(torch.rand(8, 8) < 0.9, 255, labels[1])
    losses = module.loss_by_feat(logits, labels)
    picked = [
        -logits[n].log_softmax(0)[labels[n, y, x], y, x]
        for n in range(2)
        for y in range(8)
        for x in range(8)
        if labels[n, y, x] != 255
    ]
    torch.testing.assert_close(losses["loss_seg"], 0.5 * torch.stack(picked).mean())
    assert 0 <= losses["acc_seg"] <= 100


def test_a_batch_without_any_class_has_loss_zero_and_gradients():
    module = head()
    loss = module.loss_by_feat(module(levels()), torch.full((2, 32, 64), 255))["loss_seg"]
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in module.parameters())


def test_maps_have_the_size_of_the_original_image_and_ignore_padding():
    module = head()
    logits = torch.full((1, 7, 8, 16), -5.0)
    logits[0, 2, :, :8], logits[0, 4, :, 8:12], logits[0, 6, :, 12:] = 5.0, 5.0, 5.0  # class 6 on the padding only
    meta = dict(batch_input_shape=(32, 64), img_shape=(32, 48), ori_shape=(50, 90))
    found = module.predict_by_feat(logits, [meta])[0]
    assert found.shape == (50, 90) and (found[:, :58] == 2).all() and (found[:, 62:] == 4).all()


def test_strides_must_double():
    with pytest.raises(ValueError, match="strides must double from level to level"):
        head(strides=(4, 8, 32))


def samples(count, shape=(64, 64)):
    found = []
    for _ in range(count):
        sample = DetDataSample(metainfo=dict(img_shape=shape, ori_shape=shape, batch_input_shape=shape, img_id=1))
        sample.gt_sem_seg = PixelData(sem_seg=torch.randint(0, 7, (1, *shape)))
        found.append(sample)
    return found


@pytest.mark.parametrize("name", ["semantic_fpn_r18", "semantic_fpn_r50", "semantic_fpn_swin_t", "tiny_semantic_fpn"])
def test_every_backbone_trains_and_predicts(name):
    model = build_detector(DetectorConfig(config=name), CLASSES)
    model.init_weights()
    loss, _ = model.parse_losses(model.loss(torch.randn(2, 3, 64, 64), samples(2)))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad) and 0 < loss < 10
    assert list(detector_modules(model)) == ["backbone", "neck", "semantic_head"]
    model.eval()
    with torch.no_grad():
        found = model.predict(torch.randn(1, 3, 64, 64), samples(1))[0].pred_sem_seg.sem_seg
    assert found.shape == (1, 64, 64) and found.max() < 7


@pytest.mark.parametrize(
    "name,classes,task",
    [
        ("semantic_fpn_r50", CLASSES, "semantic"),
        ("semantic_fpn_swin_t", CLASSES, "semantic"),
        ("faster_rcnn_swin_t", CLASSES, "detection"),
        ("panoptic_fpn_swin_t", STUFF, "panoptic"),
        ("mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py", STUFF, "panoptic"),
        ("mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py", CLASSES, "instance"),
    ],
)
def test_the_papers_pipelines_build_without_a_download(name, classes, task):
    model = build_detector(DetectorConfig(config=name), classes)
    # Published sizes without classifiers: 27.5 M for Swin-Tiny (with a norm for each output), 23.5 M for ResNet-50.
    assert sum(p.numel() for p in model.backbone.parameters()) / 1e6 == pytest.approx(
        27.5 if "swin" in name else 23.5, abs=0.03
    )
    if task == "panoptic":
        assert model.semantic_head.conv_logits.out_channels == 3 and model.roi_head.bbox_head.num_classes == 5
        assert model.panoptic_fusion_head.num_classes == 7


@pytest.mark.parametrize("name", ["tiny_faster_rcnn", "tiny_mask_rcnn", "tiny_panoptic_fpn", "tiny_retinanet"])
@pytest.mark.parametrize("depth,expansion", [(18, 1), (50, 4)])
def test_the_tiny_pipelines_take_either_resnet(name, depth, expansion):
    options = {"backbone.depth": depth, "neck.in_channels": [32 * expansion * 2**k for k in range(4)]}
    task = {"tiny_mask_rcnn": "instance", "tiny_panoptic_fpn": "panoptic"}.get(name, "detection")
    config = DetectorConfig(config=name, options=options)
    with torch.device("meta"):
        model = build_detector(config, STUFF if task == "panoptic" else CLASSES)
        assert len(model.extract_feat(torch.empty(1, 3, 64, 64))) >= 3
    assert model_config(config, CLASSES).backbone.depth == depth
