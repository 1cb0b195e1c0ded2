"""The paper's ablations: they train, and each takes away what it says, and only that."""

import pytest
import torch
from tiny_run import TINY, merged, train_tiny

from engine.config.schema import DetectorConfig, ParamwiseConfig
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.modeling.detector import build_detector
from engine.optim.param_groups import param_groups
from engine.recipes.load import parse_config
from engine.zero.partitioned_build import initialise
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.structures import DetDataSample  # noqa: E402
from mmengine.structures import InstanceData  # noqa: E402

CLASSES = Classes(("a", "b", "c"), (), (1, 2, 3))
PANOPTIC = Classes(("a", "b", "c"), ("d",), (1, 2, 3, 4))
SIZE = (96, 128)
FASTER = {
    "backbone.depth": 18,
    "backbone.base_channels": 8,
    "backbone.norm_eval": False,
    "backbone.frozen_stages": -1,
    "neck.in_channels": [8, 16, 32, 64],
    "neck.out_channels": 16,
    "rpn_head.in_channels": 16,
    "rpn_head.feat_channels": 16,
    "roi_head.bbox_roi_extractor.out_channels": 16,
    "roi_head.bbox_head.in_channels": 16,
    "roi_head.bbox_head.fc_out_channels": 32,
}
CONFIGS = {
    "retinanet": ("tiny_retinanet", TINY["detector"]["options"]),
    "faster_rcnn": ("mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", FASTER),
}


def build(kind="retinanet", *, options=None, frozen=(), **ablation):
    name, own = CONFIGS[kind]
    torch.manual_seed(0)
    config = DetectorConfig(config=name, options={**own, **(options or {})}, ablation=ablation, frozen=list(frozen))
    model = build_detector(config, CLASSES)
    initialise(model)
    return model.train()


def batch(images=2):
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(images):
        data = DetDataSample(
            metainfo=dict(
                img_shape=SIZE, pad_shape=SIZE, batch_input_shape=SIZE, ori_shape=SIZE, scale_factor=(1.0, 1.0)
            )
        )
        data.gt_instances = InstanceData(
            bboxes=torch.tensor([[10.0, 10, 50, 60], [60, 30, 110, 90]]), labels=torch.tensor([0, 2])
        )
        samples.append(data)
    return torch.randn(images, 3, *SIZE, generator=generator), samples


def total_loss(model, seed=0):
    """The sum that is trained on, and its parts."""
    torch.manual_seed(seed)
    parts = [
        part.sum()
        for name, value in model.loss(*batch()).items()
        if "loss" in name
        for part in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return sum(parts), parts


def dense_head(model):
    return model.rpn_head if hasattr(model, "rpn_head") else model.bbox_head


def touched(module):
    return {name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    "ablation",
    [
        {"no_fpn": True},
        {"independent_heads": True},
        {"ignored_pixels": 0.75},
        {"no_fpn": True, "independent_heads": True, "ignored_pixels": 0.75},
    ],
    ids=lambda a: "+".join(a),
)
def test_every_ablation_trains_every_module(kind, ablation):
    model = build(kind, **ablation)
    loss, parts = total_loss(model)
    assert all(torch.isfinite(part).all() for part in parts) and loss > 0
    loss.backward()
    for name in ("backbone", "neck", "rpn_head", "bbox_head", "roi_head"):
        if hasattr(model, name):
            assert touched(getattr(model, name)), name
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind, stride, width", [("retinanet", 8, 16), ("faster_rcnn", 32, 64)])
def test_without_a_pyramid_there_is_one_level_with_all_anchors(kind, stride, width):
    plain, bare = build(kind), build(kind, no_fpn=True)
    features = bare.extract_feat(batch()[0])
    assert len(plain.extract_feat(batch()[0])) > 1 and len(features) == 1
    assert features[0].shape[-2:] == (SIZE[0] // stride, SIZE[1] // stride)
    assert [p.shape for p in bare.neck.parameters()] == [(16, width, 1, 1), (16,)]

    def sizes(model):
        return sorted(
            {
                tuple(round(v, 2) for v in (b[2:] - b[:2]).tolist())
                for base in dense_head(model).prior_generator.base_anchors
                for b in base
            }
        )

    assert sizes(bare) == sizes(plain)
    if kind == "faster_rcnn":
        assert bare.roi_head.bbox_roi_extractor.featmap_strides == [stride]


@pytest.mark.parametrize("kind", CONFIGS)
def test_independent_heads_with_the_shared_weights_are_the_shared_head(kind):
    """Same outputs and losses, so nothing but the sharing has gone."""
    shared, apart = build(kind), build(kind, independent_heads=True)
    weights = dict(shared.state_dict())
    name = "rpn_head" if kind == "faster_rcnn" else "bbox_head"
    for key in [key for key in weights if key.startswith(f"{name}.")]:
        for level in range(len(dense_head(apart).levels)):
            weights[f"{name}.levels.{level}.{key.removeprefix(name + '.')}"] = weights[key]
        del weights[key]
    apart.load_state_dict(weights)
    assert total_loss(apart)[0].item() == pytest.approx(total_loss(shared)[0].item(), rel=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_level_moves_no_other_levels_head(kind):
    model = build(kind, independent_heads=True)
    head = dense_head(model)
    assert len(head.levels) == head.prior_generator.num_levels > 1
    outputs = head([feature.detach() for feature in model.extract_feat(batch()[0])])
    sum(output[1].sum() for output in outputs).backward()
    moved = touched(head)
    assert moved and all(name.startswith("levels.1.") for name in moved)
    shared = sum(p.numel() for p in dense_head(build(kind)).parameters())
    assert sum(p.numel() for p in head.parameters()) == shared * len(head.levels)


def test_independent_heads_start_like_the_shared_one():
    """Small weights and RetinaNet's prior of 1 % on every level, and no two levels alike."""
    levels = build(independent_heads=True).bbox_head.levels
    prior = torch.log(torch.tensor(0.01 / 0.99))
    for head in levels:
        assert torch.allclose(head.retina_cls.bias, prior) and 0.008 < head.retina_cls.weight.std() < 0.012
    assert not torch.equal(levels[0].retina_cls.weight, levels[1].retina_cls.weight)


def gradients_of_scores(share, seed=0):
    """Of the classification scores of RetinaNet, by level: (images, pixels, anchors and classes)."""
    model = build(ignored_pixels=share)
    seen = []

    def keep(module, inputs, outputs):
        for score in outputs[0]:
            score.retain_grad()
            seen.append(score)

    model.bbox_head.register_forward_hook(keep)
    loss, _ = total_loss(model, seed)
    loss.backward()
    return [score.grad.flatten(2).transpose(1, 2) for score in seen]


def test_three_quarters_of_the_pixels_are_ignored_whole_and_anew_every_time():
    def without(levels, every):
        return torch.cat(
            [(level == 0).all(-1).flatten() if every else (level == 0).any(-1).flatten() for level in levels]
        )

    plain, first, second = (gradients_of_scores(share, seed) for share, seed in ((0.0, 0), (0.75, 0), (0.75, 1)))
    assert without(plain, every=True).float().mean() < 0.02
    whole = without(first, every=True)
    assert whole.float().mean() == pytest.approx(0.75, abs=0.06)
    # A pixel that lacks some anchors only is one where the assigner leaves out some anyway.
    assert not (without(first, every=False) & ~whole & ~without(plain, every=False)).any()
    assert not torch.equal(whole, without(second, every=True))
    assert not torch.equal((first[0][0] == 0).all(-1), (first[0][1] == 0).all(-1))  # images draw apart


def test_ignoring_pixels_keeps_the_expected_loss():
    model = build(ignored_pixels=0.75)
    with torch.no_grad():
        seen = torch.stack([total_loss(model, seed)[0] for seed in range(60)])
        expected = total_loss(build())[0]
    assert seen.std() > 0
    assert abs(seen.mean() - expected) < 4 * seen.std() / 60**0.5 and seen.std() < expected


@pytest.mark.parametrize("proposals", [512, 10])
def test_the_number_of_proposals_is_an_option_of_mmdet(proposals):
    model = build("faster_rcnn", options={"train_cfg.rcnn.sampler.num": proposals})
    rows = []
    model.roi_head.bbox_head.register_forward_hook(lambda module, inputs, output: rows.append(len(inputs[0])))
    total_loss(model)
    assert rows == [20] if proposals == 10 else rows[0] > 200


def test_a_frozen_head_is_trained_through_and_has_no_module():
    model = build("faster_rcnn", frozen=["roi_head.bbox_head"])
    total_loss(model)[0].backward()
    assert not touched(model.roi_head) and touched(model.rpn_head) and touched(model.backbone)
    groups = param_groups(model, ParamwiseConfig(), lr=0.1, weight_decay=0.0)
    assert {group["module"] for group in groups} == {"backbone", "neck", "rpn_head"}


@pytest.mark.parametrize(
    "name, options, task, ablation, words",
    [
        (
            "uninet_tiny_htcx",
            {},
            "instance",
            {"no_fpn": True},
            "detector.ablation.no_fpn takes mmdet's FPN away, but the neck of this detector is HTCXPyramid",
        ),
        (
            "mmdet::panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py",
            {},
            "panoptic",
            {"no_fpn": True},
            "detector.ablation.no_fpn leaves one level, but the semantic head of this detector joins several",
        ),
        (
            "mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py",
            {},
            "detection",
            {"no_fpn": True},
            "this detector has no such anchors",
        ),
        (
            "mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py",
            {},
            "detection",
            {"ignored_pixels": 0.5},
            "detector.ablation.independent_heads and ignored_pixels are made for RetinaHead and RPNHead, but the "
            "bbox_head of this detector is FCOSHead",
        ),
        (
            "tiny_retinanet",
            {"bbox_head": None},
            "detection",
            {"ignored_pixels": 0.5},
            "but the bbox_head of this detector is None",
        ),
        ("tiny_retinanet", {"bbox_head": None}, "detection", {"no_fpn": True}, "this detector has no such anchors"),
        (
            "tiny_retinanet",
            {
                "backbone": {"_delete_": True, "type": "TimmBackbone", "model_name": "resnet10t"},
                "neck.in_channels": [64, 128, 256, 512],
            },
            "detection",
            {"no_fpn": True},
            "detector.ablation.no_fpn keeps the last of the maps that the backbone's out_indices name, but this "
            'detector leaves them out: give them in detector.options, such as "backbone.out_indices": [0, 1, 2, 3]',
        ),
    ],
)
def test_an_ablation_that_does_not_fit_is_refused(name, options, task, ablation, words):
    with pytest.raises(ConfigError) as caught:
        build_detector(
            DetectorConfig(config=name, options=options, ablation=ablation), PANOPTIC if task == "panoptic" else CLASSES
        )
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ablation, sentence",
    [
        ({"ignored_pixels": 1.0}, "detector.ablation.ignored_pixels must be below 1.0, got 1.0"),
        ({"ignored_pixels": -0.1}, "detector.ablation.ignored_pixels must be at least 0.0, got -0.1"),
        ({"no_fpm": True}, 'unknown key "detector.ablation.no_fpm" (did you mean "no_fpn"?)'),
        ({"no_fpn": 1}, "detector.ablation.no_fpn must be true or false, got 1"),
    ],
)
def test_a_wrong_ablation_says_what_is_allowed(ablation, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_config(merged({"detector": {"ablation": ablation}}))
    assert str(caught.value) == sentence


def test_a_classifier_has_no_ablations():
    with pytest.raises(ConfigError, match="detector.ablation is for detectors"):
        parse_config(
            {
                **TINY,
                "detector": {"config": "timm::resnet10t", "ablation": {"no_fpn": True}},
                "data": {"dataset": "shapes", "task": "classification"},
            }
        )


def _train(changes):
    result = train_tiny(changes)
    return {"records": result["records"], "weights": result["weights"]}


def test_the_ablated_detector_trains_with_agvm_alike_on_one_rank_and_two(ranks):
    """Random pixels belong to the micro-batch, whoever computes it."""
    # With a pyramid: of the nine pixels of one level, a half batch may keep none that has an object.
    changes = {
        "detector": {"ablation": {"independent_heads": True, "ignored_pixels": 0.75}},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AGVMSGD", "params": {"lr": 0.01, "tau": 1, "start_step": 0, "anchor": "bbox_head"}},
    }
    one, two = (ranks.run(_train, world, changes)[0] for world in (1, 2))
    assert [record["step"] for record in one["records"]] == [1, 2, 3]
    for a, b in zip(one["records"], two["records"]):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and set(a["phi"]) == {"backbone", "neck", "bbox_head"}
        assert a["mu"]["bbox_head"] == 1  # the anchor module
    for name, value in one["weights"].items():
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(two["weights"][name]), rtol=1e-4, atol=1e-6)
