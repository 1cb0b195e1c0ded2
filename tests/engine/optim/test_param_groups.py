"""Param groups: every trainable parameter once, under its module, decay and learning-rate factor."""

import pytest
import torch
from torch import nn

from engine.config.schema import DetectorConfig, OptimizerConfig, ParamwiseConfig
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.optim.param_groups import param_groups
from engine.optim.registry import build_optimizer, set_learning_rate

CLASSES = Classes(("a", "b"), (), (1, 2))
SWIN = {
    "backbone": {
        "type": "SwinTransformer",
        "_delete_": True,
        "embed_dims": 12,
        "depths": [1, 2, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "window_size": 4,
        "use_abs_pos_embed": True,
        "pretrain_img_size": 32,
    },
    "neck.in_channels": [12, 24, 48, 96],
}
TIMM = {
    "backbone": {"type": "TimmBackbone", "_delete_": True, "model_name": "resnet10t"},
    "neck.in_channels": [64, 128, 256, 512],
}
VIT = {
    "backbone": {
        "type": "TimmBackbone",
        "_delete_": True,
        "model_name": "vit_tiny_patch16_224",
        "depth": 4,
        "out_indices": [0, 1, 2, 3],
    },
    "neck.in_channels": [192] * 4,
}
FASTER = "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"
THIN = {"backbone.depth": 18, "backbone.base_channels": 8, "neck.in_channels": [8, 16, 32, 64]}


def detector(config="tiny_retinanet", options=None, frozen=()):
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from engine.modeling.detector import build_detector

    return build_detector(DetectorConfig(config=config, options=options or {}, frozen=list(frozen)), CLASSES)


@pytest.fixture(scope="module")
def retinanet():
    return detector()


def groups_of(model, *, lr=1.0, weight_decay=0.5, **paramwise):
    return param_groups(model, ParamwiseConfig(**paramwise), lr=lr, weight_decay=weight_decay)


def table(model, **options):
    """Parameter name -> its group; fails unless every trainable parameter is in exactly one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(parameter)], group) for group in groups_of(model, **options) for parameter in group["params"]]
    assert sorted(name for name, _ in found) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    return dict(found)


def test_groups_are_few_one_for_each_module_and_decay(retinanet):
    groups = groups_of(retinanet, norm_decay=False, bias_decay=False)
    assert [(g["module"], g["weight_decay"]) for g in groups] == [
        ("backbone", 0.5),
        ("backbone", 0.0),
        ("neck", 0.5),
        ("neck", 0.0),
        ("bbox_head", 0.5),
        ("bbox_head", 0.0),
    ]
    assert [g["module"] for g in groups_of(retinanet)] == ["backbone", "neck", "bbox_head"]
    assert all(g["lr"] == g["base_lr"] == 0.3 for g in groups_of(retinanet, lr=0.3))


def test_two_stage_heads_are_modules_of_their_own():
    found = table(detector(FASTER, THIN))
    assert {group["module"] for group in found.values()} == {"backbone", "neck", "rpn_head", "bbox_head"}
    assert found["roi_head.bbox_head.fc_cls.weight"]["module"] == "bbox_head"


@pytest.mark.parametrize("options", [{}, SWIN, TIMM], ids=["resnet", "swin", "timm"])
def test_norms_and_biases_can_go_without_decay(options):
    model = detector(options=options)
    modules = dict(model.named_modules())

    def is_norm(name):  # and what goes with them
        table = name.endswith(("relative_position_bias_table", "absolute_pos_embed"))
        return table or "Norm" in type(modules[name.rpartition(".")[0]]).__name__

    for norms, biases in ((False, True), (True, False), (False, False)):
        found = table(model, norm_decay=norms, bias_decay=biases)
        seen = set()
        for name, group in found.items():
            kind = "norm" if is_norm(name) else "bias" if name.endswith("bias") else "weight"
            expected = {"norm": norms, "bias": biases, "weight": True}[kind]
            assert (group["weight_decay"] == 0.5) == expected, name
            seen.add(kind)
        assert seen == {"norm", "bias", "weight"}
    if options is SWIN:
        assert sum(name.endswith("relative_position_bias_table") for name in found) == 5
        assert found["backbone.absolute_pos_embed"]["weight_decay"] == 0


def test_the_longest_prefix_gives_the_learning_rate(retinanet):
    found = table(
        retinanet,
        lr=0.2,
        lr_mult={
            "backbone": 0.1,
            "backbone.layer1": 0.5,
            "backbone.layer1.1": 0.25,
            "backbone.conv1.weight": 0.0,
            "neck": 3,
        },
    )
    expected = {
        "backbone.conv1.weight": 0.0,
        "backbone.layer1.0.conv1.weight": 0.1,
        "backbone.layer1.1.conv1.weight": 0.05,
        "backbone.layer2.0.conv1.weight": 0.02,
        "neck.lateral_convs.0.conv.weight": 0.6,
        "bbox_head.retina_cls.weight": 0.2,
    }
    assert {name: found[name]["lr"] for name in expected} == pytest.approx(expected)


def test_a_prefix_ends_at_a_dot():
    model = nn.ModuleDict({"neck": nn.Linear(2, 2), "neck2": nn.Linear(2, 2)})
    found = table(model, lr_mult={"neck": 0.5})
    assert (found["neck.weight"]["lr"], found["neck2.weight"]["lr"]) == (0.5, 1.0)


def test_a_prefix_that_fits_nothing_is_refused(retinanet):
    with pytest.raises(ConfigError, match=r'no parameter begins with "backbone.layer9" \(did you mean "backbone.layer'):
        groups_of(retinanet, lr_mult={"backbone.layer9": 0.1})


@pytest.mark.parametrize(
    "options,blocks",
    [
        ({}, ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0", "layer4.1"]),
        (
            SWIN,
            ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1", "stages.2.blocks.0", "stages.3.blocks.0"],
        ),
        (TIMM, ["body.layer1.0", "body.layer2.0", "body.layer3.0", "body.layer4.0"]),
    ],
    ids=["resnet", "swin", "timm"],
)
def test_layer_decay_counts_blocks_from_the_head_down(options, blocks):
    found = table(detector(options=options), layer_decay=0.5)
    factor = {name: group["lr"] for name, group in found.items()}
    stem = [name for name in factor if name.startswith("backbone.") and ("conv1.0" in name or "patch_embed" in name)]
    stem += [name for name in ("backbone.conv1.weight", "backbone.bn1.weight") if name in factor]
    assert stem and all(factor[name] == 0.5 ** (len(blocks) + 1) for name in stem)
    for depth, block in enumerate(reversed(blocks), 1):
        inside = [name for name in factor if name.startswith(f"backbone.{block}.")]
        assert inside and all(factor[name] == 0.5**depth for name in inside), block
    assert all(factor[name] == 1 for name in factor if not name.startswith("backbone."))
    # What stands between or behind blocks (patch merging, a norm of an output) goes with the block before it.
    if options is SWIN:
        assert (
            factor["backbone.stages.0.downsample.reduction.weight"] == factor["backbone.stages.0.blocks.0.norm1.weight"]
        )
        assert factor["backbone.norm3.weight"] == 0.5


def test_layer_decay_multiplies_lr_mult(retinanet):
    found = table(retinanet, layer_decay=0.5, lr_mult={"backbone": 0.1, "neck": 2})
    assert found["backbone.layer4.1.conv1.weight"]["lr"] == pytest.approx(0.05)
    assert found["neck.lateral_convs.0.conv.weight"]["lr"] == 2


def test_layer_decay_is_refused_where_layers_cannot_be_counted():
    with pytest.raises(ConfigError, match="layer_decay: the backbone has no blocks"):
        groups_of(detector(options=VIT), layer_decay=0.9)


def test_frozen_parameters_are_in_no_group():
    model = detector(frozen=["backbone", "neck.lateral_convs"])
    found = table(model)
    assert {group["module"] for group in found.values()} == {"neck", "bbox_head"}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        groups_of(model)


def test_a_shared_parameter_is_in_one_group():
    model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    assert sorted(table(model)) == ["one.bias", "one.weight", "two.bias"]


def build(model, kind, params, **paramwise):
    return build_optimizer(OptimizerConfig(type=kind, params=params, paramwise=paramwise), model, warmup_steps=3)


def small():
    torch.manual_seed(0)
    return nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "head": nn.Linear(4, 1)})


@pytest.mark.parametrize(
    "kind,params",
    [
        ("AdamW", {"lr": 0.01}),
        ("AdamW", {"lr": 0.01, "betas": [0.5, 0.9], "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("RMSprop", {"lr": 0.01, "alpha": 0.5}),
    ],
)
def test_torchs_optimizers_keep_torchs_meaning(kind, params):
    """Their own defaults too, such as AdamW's weight decay of 0.01: groups change nothing where nothing is asked."""
    mine, theirs = small(), small()
    optimizers = [build(mine, kind, params), getattr(torch.optim, kind)(theirs.parameters(), **params)]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        for model, optimizer in zip((mine, theirs), optimizers):
            optimizer.zero_grad()
            model["head"](model["backbone"](x)).square().mean().backward()
            optimizer.step()
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters()):
        assert torch.equal(a, b), name


def test_the_schedule_sets_every_groups_rate_from_its_base():
    optimizer = build(small(), "SGD", {"lr": 0.1}, lr_mult={"backbone": 0.1})
    for factor in (0.001, 1.0, 0.5):
        set_learning_rate(optimizer, factor)
        assert {g["module"]: g["lr"] for g in optimizer.param_groups} == pytest.approx(
            {"backbone": 0.01 * factor, "head": 0.1 * factor}
        )


def test_ours_starts_when_the_warm_up_ends_and_takes_modules_by_name():
    modules = {"first": ["backbone.0"], "rest": ["backbone.1", "head"]}
    optimizer = build(small(), "AGVMSGD", {"lr": 0.1, "anchor": "first", "modules": modules})
    assert {g["module"] for g in optimizer.param_groups} == set(modules)
    assert optimizer.modulator.start_step == 3


@pytest.mark.parametrize(
    "kind,params,words",
    [
        ("AdamWW", {"lr": 0.1}, r'optimizer.type "AdamWW" is none of .*AdamW.* \(did you mean "AdamW"\?\)'),
        ("LBFGS", {"lr": 0.1}, "LBFGS cannot work on ZeRO's flat shards"),
        ("Muon", {"lr": 0.1}, "Muon cannot work on ZeRO's flat shards"),
        ("Optimizer", {"lr": 0.1}, "cannot work"),
        ("SGD", {}, "optimizer.params.lr must be a number >= 0, got None"),
        ("SGD", {"lr": "0.1"}, "optimizer.params.lr must be a number >= 0, got '0.1'"),
        ("SGD", {"lr": -1}, "got -1"),
        ("SGD", {"lr": float("nan")}, "got nan"),
        ("SGD", {"lr": 0.1, "momentun": 0.9}, r"optimizer SGD does not take these params \(.*momentun"),
        ("SGD", {"lr": 0.1, "momentum": -1}, "does not take these params"),
        ("AdamW", {"lr": 0.1, "betas": [0.9]}, "does not take these params"),
        ("AdamW", {"lr": 0.1, "weight_decay": "much"}, "optimizer.params.weight_decay must be a number, got 'much'"),
        (
            "AGVMSGD",
            {"lr": 0.1, "anchor": "head", "modules": {"head": ["head"]}},
            '"backbone.0.weight" is in none of the modules',
        ),
        (
            "AGVMSGD",
            {"lr": 0.1, "anchor": "head", "modules": ["head"]},
            "optimizer.params.modules must give each module",
        ),
        ("AGVMSGD", {"lr": 0.1, "anchor": "body"}, "does not take these params"),
    ],
)
def test_a_bad_optimizer_block_is_refused_in_one_sentence(kind, params, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(small(), kind, params)
    assert "\n" not in str(caught.value)
