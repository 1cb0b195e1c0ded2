"""HTC-X: the zoo's detectors as they are built, what their parts compute, and that everything learns."""

import copy

import pytest
import torch
from torch import nn

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.modeling.detector import build_detector, model_config
from engine.optim import detector_modules, module_groups
from engine.zero.partitioned_build import initialise
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.registry import MODELS  # noqa: E402
from mmdet.structures import DetDataSample  # noqa: E402
from mmdet.structures.mask import BitmapMasks  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402

from models.htcx.box_head import DecoupledTransformerBoxHead  # noqa: E402

COCO = Classes(tuple(f"c{i}" for i in range(80)), (), tuple(range(1, 81)))
FEW = Classes(("a", "b", "c"), (), (1, 2, 3))
MODULES = {"backbone", "neck", "rpn_head", "bbox_head", "mask_head", "context_head"}


def millions(module):
    return sum(p.numel() for p in module.parameters()) / 1e6


def build(name="uninet_tiny_htcx", classes=FEW, task="instance", **options):
    torch.manual_seed(0)
    model = build_detector(DetectorConfig(config=name, options=options), classes)
    initialise(model)
    return model


def sample(size=(96, 128), boxes=((10, 10, 50, 60), (60, 30, 110, 90)), labels=(0, 2)):
    shape = dict(img_shape=size, pad_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0), ori_shape=size)
    boxes = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    masks = torch.zeros(len(boxes), *size)
    for mask, (x, y, x2, y2) in zip(masks, boxes.int().tolist()):
        mask[y:y2, x:x2] = 1
    data = DetDataSample(metainfo=shape)
    data.gt_instances = InstanceData(
        bboxes=boxes,
        labels=torch.tensor(labels, dtype=torch.long),
        masks=BitmapMasks(masks.numpy().astype("uint8"), *size),
    )
    return data


@pytest.mark.parametrize(
    "name, task, total",
    [
        ("uninet_g_htcx", "instance", 1140.1),
        ("uninet_g_htcx_o365", "detection", 1137.2),
        ("uninet_b1_htcx", "instance", 14.1),
        ("uninet_tiny_htcx", "instance", 2.8),
    ],
)
def test_zoo_detectors_and_their_size(name, task, total):
    with torch.device("meta"):
        model = build_detector(DetectorConfig(config=name), COCO)
    assert round(millions(model), 1) == total
    assert set(detector_modules(model)) == (MODULES if task == "instance" else MODULES - {"mask_head"})
    assert len(model.roi_head.bbox_head) == 3
    assert [a.pos_iou_thr for a in model.roi_head.bbox_assigner] == [0.6, 0.7, 0.8]
    assert [len(head.bbox_coder.stds) for head in model.roi_head.bbox_head] == [4] * 3
    assert len({head.bbox_coder.stds[0] for head in model.roi_head.bbox_head}) == 3
    if "_g_" in name:
        assert round(millions(model.backbone), 1) == 1080.2
        assert model.rpn_head.prior_generator.strides == [(s, s) for s in (8, 16, 32, 64, 128, 256)]
        assert all(len(h.cls_tower.blocks) == len(h.reg_tower.blocks) == 4 for h in model.roi_head.bbox_head)
        generator = model.rpn_head.prior_generator
        assert [base * float(generator.scales[0]) for base in generator.base_sizes] == [32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize("size", [(400, 533), (96, 417)])
def test_the_papers_pyramid_at_small_and_odd_sizes(size):
    """P3 to P8 of a tiny network: the shorter side of 400 pixels has two at P8."""
    model = build(**{"neck.num_outs": 6, "rpn_head.anchor_generator.strides": [8, 16, 32, 64, 128, 256]}).eval()
    height, width = (-(-side // 32) * 32 for side in size)  # as the preprocessor pads
    with torch.no_grad():
        maps = model.extract_feat(torch.randn(1, 3, height, width))
        found = model.predict(torch.randn(1, 3, height, width), [sample((height, width))])
    assert [tuple(m.shape[2:]) for m in maps] == [(-(-height // s), -(-width // s)) for s in (8, 16, 32, 64, 128, 256)]
    assert found[0].pred_instances.masks.shape[1:] == (height, width)


def test_every_parameter_learns():
    """All have a gradient after one step, and one that is not zero by the third (zero-initialised layers need two)."""
    model = build().train()
    optimizer = torch.optim.AdamW(module_groups(model), lr=1e-3)
    images = torch.randn(2, 3, 96, 128)
    moved = set()
    for step in range(3):
        torch.manual_seed(step)
        loss, _ = model.parse_losses(model.loss(images, [sample(), sample(labels=(1, 2))]))
        optimizer.zero_grad()
        loss.backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        assert not missing, missing
        moved |= {name for name, p in model.named_parameters() if p.grad.abs().max() > 0}
        optimizer.step()
    still = {name for name, _ in model.named_parameters()} - moved
    assert not still, still


@pytest.mark.parametrize("images", [[()], [(), ((10, 10, 50, 60),)]])
def test_images_without_objects_have_a_finite_loss(images):
    model = build().train()
    samples = [sample(boxes=boxes, labels=(1,) * len(boxes)) for boxes in images]
    loss, parts = model.parse_losses(model.loss(torch.randn(len(samples), 3, 96, 128), samples))
    loss.backward()
    assert torch.isfinite(loss) and {"loss_context", "loss_mask", "s0.loss_cls", "s2.loss_bbox"} <= set(parts)


def test_without_any_region_every_head_is_entered_and_every_loss_is_there():
    """As ZeRO-3 and the sum of losses over ranks need it; mmdet's cascade would stop at its first stage."""
    model = build().train()
    entered = []
    for head in (*model.roi_head.bbox_head, model.roi_head.mask_head):
        head.register_forward_hook(lambda *_, head=head: entered.append(head))
    maps = model.extract_feat(torch.randn(1, 3, 96, 128))
    nothing = sample(boxes=(), labels=())
    losses = model.roi_head.loss(maps, [InstanceData(bboxes=torch.zeros(0, 4), scores=torch.zeros(0))], [nothing])
    assert len(entered) == 4 and {"s0.loss_cls", "s1.loss_cls", "s2.loss_cls", "s2.loss_bbox", "loss_mask"} <= set(
        losses
    )
    sum(value for name, value in losses.items() if "loss" in name).backward()


def test_box_only_mode_has_no_masks():
    model = build(task="detection", **{"roi_head.mask_head": None}).eval()
    with torch.no_grad():
        found = model.predict(torch.randn(1, 3, 96, 128), [sample()])[0].pred_instances
    assert "masks" not in found and found.bboxes.shape[1] == 4
    losses = model.train().loss(torch.randn(1, 3, 96, 128), [sample()])
    assert "loss_mask" not in losses and "loss_context" in losses


def test_context_is_added_to_the_regions_of_its_own_image():
    model = build().eval()
    head, maps = model.roi_head, [torch.randn(2, 64, 12 // 2**i + 1, 16 // 2**i) for i in range(4)]
    rois = torch.tensor([[1.0, 5, 5, 50, 60], [0, 20, 8, 60, 60], [1, 3, 3, 9, 9]])
    with torch.no_grad():
        with_context, scores = head._with_context(maps)
        extractor = head.bbox_roi_extractor[0]
        plain = extractor(maps, rois)
        expected = plain + with_context.context[[1, 0, 1]]
        assert torch.equal(head._region_features(extractor, with_context, rois), expected)
        assert not torch.allclose(with_context.context[0], with_context.context[1])
        assert scores.shape == (2, 3)
        by_hand = head.context_head([maps[3]])[0]  # it reads P6
        assert torch.equal(scores, by_hand)


def test_the_mask_head_trains_on_the_last_stage_only():
    model = build().train()
    calls = []
    forward = model.roi_head._mask_forward
    model.roi_head._mask_forward = lambda x, rois: calls.append(len(rois)) or forward(x, rois)
    losses = model.loss(torch.randn(1, 3, 96, 128), [sample()])
    assert len(calls) == 1
    model.roi_head.mask_loss_weight = 3.0
    torch.manual_seed(5)
    heavy = model.loss(torch.zeros(1, 3, 96, 128), [sample()])["loss_mask"]
    model.roi_head.mask_loss_weight = 1.0
    torch.manual_seed(5)
    assert heavy.item() == pytest.approx(
        3 * model.loss(torch.zeros(1, 3, 96, 128), [sample()])["loss_mask"].item(), rel=1e-4
    )
    assert {name for name in losses if "mask" in name} == {"loss_mask"}


@pytest.mark.parametrize("pooling", ["mean", "token", "flatten"])
def test_box_head_towers_are_apart(pooling):
    torch.manual_seed(0)
    head = DecoupledTransformerBoxHead(
        cls_depth=1, reg_depth=2, num_heads=4, pooling=pooling, in_channels=32, num_classes=5
    )
    head.init_weights()
    scores, deltas = head(torch.randn(3, 32, 7, 7))
    assert scores.shape == (3, 6) and deltas.shape == (3, 4)
    scores.sum().backward()
    touched = {name.split(".")[0] for name, p in head.named_parameters() if p.grad is not None}
    assert touched == {"cls_tower", "fc_cls"}
    empty = head(torch.zeros(0, 32, 7, 7))
    assert empty[0].shape == (0, 6) and empty[1].shape == (0, 4)


def test_positions_tell_pixels_apart():
    torch.manual_seed(0)
    head = DecoupledTransformerBoxHead(cls_depth=1, reg_depth=1, num_heads=4, in_channels=32, num_classes=5)
    head.init_weights()
    for tower in (head.cls_tower, head.reg_tower):
        nn.init.normal_(tower.position, std=1.0)
    nn.init.normal_(head.fc_cls.weight)
    x = torch.randn(1, 32, 7, 7)
    assert not torch.allclose(head(x)[0], head(x.flip(3))[0], atol=1e-3)


def test_soft_nms_and_bf16():
    model = build().eval()
    assert model.roi_head.test_cfg.nms.type == "soft_nms"
    x = torch.randn(1, 3, 96, 128)
    with torch.no_grad():
        plain = model.extract_feat(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = model.extract_feat(x)
            found = model.predict(x, [sample()])[0].pred_instances
    for a, b in zip(half, plain):
        assert (a.float() - b).norm() / b.norm() < 0.05
    assert len(found) > 0 and torch.isfinite(found.bboxes).all()


def test_wrong_options_are_one_sentence():
    from engine.errors import ConfigError

    for options, words in (
        ({"roi_head.bbox_head.pooling": "max"}, "pooling is one of"),
        ({"roi_head.target_stds": [[0.1] * 4]}, "target_stds needs"),
        ({"backbone.arch": "h"}, 'no arch "h"'),
        ({"neck.out_channels": 60}, "divide by 16"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(**options)


def test_the_zoo_files_are_plain_mmdet_configs():
    config = model_config(DetectorConfig(config="uninet_g_htcx"), COCO)
    assert config.roi_head.context_head.num_classes == config.roi_head.bbox_head.num_classes == 80
    small = copy.deepcopy(model_config(DetectorConfig(config="uninet_tiny_htcx"), FEW))
    assert MODELS.build(small).roi_head.mask_head.num_classes == 3
