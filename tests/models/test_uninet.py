"""UniNet: parameter counts, sizes, attention, what is frozen, and the same network as timm classifier."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.registry import MODELS  # noqa: E402

from models.uninet.backbone import UniNet  # noqa: E402
from models.uninet.blocks import ConvBlock, LocalGlobalDownsample, TransformerBlock, fused_block  # noqa: E402
from models.uninet.variants import VARIANTS, variant  # noqa: E402

# With 1000 classes, of the published models (B0 is B1 at another input size).
MILLIONS = {"b0": 11.451, "b1": 11.451, "b2": 16.211, "b3": 24.020, "b4": 43.796, "b5": 72.883, "b6": 116.687}


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("arch", MILLIONS)
def test_classifiers_have_the_published_number_of_parameters(arch):
    with torch.device("meta"):
        assert round(count(timm.create_model(f"uninet_{arch}")) / 1e6, 3) == MILLIONS[arch]


def test_uninet_g_has_1080_million_parameters():
    with torch.device("meta"):
        model = UniNet("g")
    assert round(count(model) / 1e6, 1) == 1080.2
    assert [round(count(stage) / 1e6, 1) for stage in model.stages] == [0.5, 16.9, 159.5, 179.7, 49.7, 673.9]
    assert count(model.stages[2].blocks[0]) == 8_852_736  # Fused MBConv at 384, expansion 6
    kinds = [block.window for stage in model.stages[4:] for block in stage.blocks]
    assert len(kinds) == 54 and kinds[:18] == [28, 28, None] * 6 and kinds[18:] == [14, 14, None] * 12


def tiny(**options):
    torch.manual_seed(0)
    model = UniNet("tiny", **{"out_indices": range(6), "layer_scale": 0.5, **options})
    model.init_weights()
    return model


@pytest.mark.parametrize("height, width", [(64, 64), (50, 77), (33, 96), (31, 17)])
def test_maps_of_every_stage_have_ceil_sizes(height, width):
    maps = tiny().eval()(torch.randn(1, 3, height, width))
    assert [tuple(m.shape[1:]) for m in maps] == [
        (c, -(-height // s), -(-width // s)) for c, s in zip(VARIANTS["tiny"].channels, (2, 4, 8, 16, 16, 32))
    ]


def test_out_indices_choose_maps_and_say_their_channels():
    model = MODELS.build(dict(type="UniNet", arch="tiny", out_indices=(2, 4, 5)))
    maps = model(torch.randn(1, 3, 40, 56))
    assert [m.shape[1] for m in maps] == model.channels == [40, 64, 96] and model.strides == [8, 16, 32]


@pytest.mark.parametrize("size", [(6, 9), (5, 4), (9, 2)])
def test_a_window_that_covers_the_map_is_global_attention(size):
    torch.manual_seed(0)
    block = TransformerBlock(64, 2, window=9, layer_scale=1.0)
    everywhere = copy.deepcopy(block)
    everywhere.window = None
    x = torch.randn(2, 64, *size)
    assert torch.equal(block(x), everywhere(x))


def test_windows_see_their_own_pixels_only():
    """Every window by itself, padded with zeros behind the norm, is what a block computes on the whole map."""
    torch.manual_seed(0)
    block = TransformerBlock(64, 2, window=3, layer_scale=1.0)
    x = torch.randn(1, 7, 5, 64)
    together = block.attend(x)
    padded = nn.functional.pad(x, (0, 0, 0, 1, 0, 2))  # to 9 x 6
    for top in range(0, 9, 3):
        for left in range(0, 6, 3):
            alone = block.attention(padded[:, top : top + 3, left : left + 3].flatten(1, 2)).view(1, 3, 3, 64)
            part = together[:, top : top + 3, left : left + 3]
            torch.testing.assert_close(part, alone[:, : part.shape[1], : part.shape[2]])


def test_a_transformer_block_is_its_equation():
    torch.manual_seed(0)
    block = TransformerBlock(64, 3, window=None, layer_scale=0.3)
    x = torch.randn(2, 64, 4, 5)
    y = x + nn.functional.conv2d(x, block.position.weight, block.position.bias, padding=1, groups=64)
    t = y.flatten(2).transpose(1, 2)
    qkv = block.attention.qkv(block.attention_norm(t)).view(2, 20, 3, 2, 32)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    seen = ((q @ k.transpose(2, 3) / 32**0.5).softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 64)
    t = t + 0.3 * block.attention.proj(seen)
    t = t + 0.3 * block.mlp.fc2(nn.functional.gelu(block.mlp.fc1(block.mlp_norm(t))))
    torch.testing.assert_close(block(x), t.transpose(1, 2).view(2, 64, 4, 5), rtol=1e-4, atol=1e-5)


def test_the_local_global_module_asks_all_pixels():
    torch.manual_seed(0)
    down = LocalGlobalDownsample(32, 64, 2).eval()
    x = torch.randn(1, 32, 7, 6)
    q = down.query_norm(down.project(down.depthwise_norm(down.depthwise(x))).flatten(2).transpose(1, 2))
    k, v = down.key_value(down.norm(x.flatten(2).transpose(1, 2))).chunk(2, -1)
    q, k, v = (t.view(1, -1, 2, 32).transpose(1, 2) for t in (q, k, v))
    seen = ((q @ k.transpose(2, 3) / 32**0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, 12, 64)
    shortcut = down.shortcut(nn.functional.max_pool2d(x, 3, 2, 1))
    torch.testing.assert_close(
        down(x), down.output(seen).transpose(1, 2).view(1, 64, 4, 3) + shortcut, rtol=1e-4, atol=1e-5
    )


def test_convolution_blocks_start_as_their_skip():
    model = tiny()
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(model.stages[1].blocks[0](x), x)
    own = UniNet(dict(base="b1"))
    own.init_weights()
    torch.testing.assert_close(own.stages[1].blocks[0](torch.ones(2, 48, 8, 8)), torch.ones(2, 48, 8, 8))
    assert isinstance(own.stages[1].blocks[0], ConvBlock)


def test_fused_blocks_without_expansion_are_one_convolution():
    assert [type(m).__name__ for m in fused_block(16, 16, 1).children()][0] == "Conv2d"
    assert count(fused_block(16, 16, 1)) == 16 * 16 * 9 + 32


def test_stochastic_depth_grows_linearly_over_blocks():
    model = tiny(drop_path_rate=0.33)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.33 * i / 11 for i in range(12)])


@pytest.mark.parametrize("frozen", [-1, 0, 3, 6])
def test_frozen_stages_keep_weights_and_statistics(frozen):
    model = tiny(frozen_stages=frozen).train()
    trained = {
        name.split(".")[0] if name.startswith("stem") else int(name.split(".")[1])
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert trained == ({"stem"} if frozen < 0 else set()) | set(range(max(frozen, 0), 6))
    before = {name: b.clone() for name, b in model.named_buffers() if "running_mean" in name}
    model(torch.randn(2, 3, 64, 64))
    moved = {name for name, b in model.named_buffers() if name in before and not torch.equal(b, before[name])}
    expected = {
        name for name in before if frozen < 0 or (not name.startswith("stem") and int(name.split(".")[1]) >= frozen)
    }
    assert moved == expected


def test_norms_can_be_frozen_and_synchronised():
    from models.batch_norm import Fp32BatchNorm, convert_batch_norm

    model = tiny(norm_eval=True, norm_cfg=dict(type="SyncBN", requires_grad=False)).train()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(isinstance(m, Fp32BatchNorm) and m.synchronise and not m.training for m in norms)
    assert not any(p.requires_grad for m in norms for p in m.parameters())
    convert_batch_norm(model, synchronise=False)  # as half precision does: the layer's own wish stays
    assert all(m.synchronise for m in norms)


def gradients(model, x):
    model.zero_grad()
    torch.manual_seed(1)  # which paths are dropped
    sum(m.square().mean() for m in model(x)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_recomputed_blocks_give_the_same_gradients_and_statistics():
    plain, saving = tiny(drop_path_rate=0.5).train(), tiny(drop_path_rate=0.5, with_cp=True).train()
    x = torch.randn(2, 3, 64, 48)
    for a, b in zip(gradients(plain, x).values(), gradients(saving, x).values()):
        torch.testing.assert_close(a, b)
    for (name, a), (_, b) in zip(plain.named_buffers(), saving.named_buffers()):
        torch.testing.assert_close(a, b, msg=name)


def test_bf16_autocast_is_close_to_fp32():
    model, x = tiny().eval(), torch.randn(1, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    for a, b in zip(half, model(x)):
        assert (a.float() - b).norm() / b.norm() < 0.03


def test_bad_arguments_get_one_sentence():
    for arguments, words in (
        (dict(arch="b9"), "choose one of b0"),
        (dict(arch={"depth": [1]}), "no field 'depth'"),
        (dict(arch={"channels": [32] * 6}), "needs 'depths'"),
        (dict(arch={"base": "tiny", "channels": [16, 24, 40, 64, 60, 96]}), "divisible by 32"),
        (dict(arch={"base": "tiny", "attention": ["shifted"]}), 'pattern of "window"'),
        (dict(out_indices=(6,)), "stages 0 to 5"),
        (dict(frozen_stages=7), "-1 to 6"),
        (dict(norm_cfg=dict(type="GN")), "BN or SyncBN"),
    ):
        with pytest.raises(ValueError, match=words):
            UniNet(**{"arch": "tiny", **arguments})
    assert variant({"base": "b1", "fused": True}).fused and not variant("b1").fused


def test_the_classifier_is_the_backbone_and_a_head():
    torch.manual_seed(0)
    model = timm.create_model("uninet_tiny", num_classes=7, drop_path_rate=0.1).eval()
    x = torch.randn(2, 3, 64, 64)
    assert model(x).shape == (2, 7)
    backbone = UniNet("tiny", out_indices=(5,)).eval()
    report = backbone.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys and {k.split(".")[0] for k in report.unexpected_keys} == {
        "head_conv",
        "head_norm",
        "head",
    }
    torch.testing.assert_close(backbone(x)[0], model.forward_features(x))
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    with pytest.raises(ValueError, match="no weights of uninet_tiny are published"):
        timm.create_model("uninet_tiny", pretrained=True)


def test_importing_models_registers_uninet_with_timm_and_does_not_import_mmdet():
    code = """
import sys
import models
import timm
assert len(timm.list_models("uninet_*")) == 9
assert timm.create_model("uninet_b1").num_classes == 1000
print({name.split(".")[0] for name in sys.modules} & {"mmdet", "mmengine", "torch"})
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'torch'}"


def test_every_variant_is_a_timm_model_of_the_size_it_names():
    assert timm.list_models("uninet_*") == sorted(f"uninet_{arch}" for arch in VARIANTS)
    with torch.device("meta"):
        for arch, shape in VARIANTS.items():
            model = timm.create_model(f"uninet_{arch}")
            assert model.variant == shape
            assert model.pretrained_cfg["input_size"] == (3, shape.image_size, shape.image_size)


@pytest.mark.parametrize(
    "indices, stages",
    [((2, 4, 5), (2, 4, 5)), ((0, 1, 2, 3), (0, 1, 2, 3)), ((-2,), (4,)), (2, (4, 5)), (None, (2, 4, 5))],
)
def test_features_only_gives_the_maps_of_the_backbone(indices, stages):
    options = {} if indices is None else {"out_indices": indices}
    extractor = timm.create_model("uninet_tiny", features_only=True, **options).eval()
    backbone = UniNet("tiny", out_indices=stages).eval()
    weights = {name.removeprefix("model."): value for name, value in extractor.state_dict().items()}
    report = backbone.load_state_dict(weights, strict=False)
    # Stages after the last map, and the head, are removed.
    assert not report.unexpected_keys
    assert {int(name.split(".")[1]) for name in report.missing_keys} == set(range(max(stages) + 1, 6))
    assert extractor.feature_info.channels() == backbone.channels
    assert extractor.feature_info.reduction() == backbone.strides
    x = torch.randn(1, 3, 64, 64)
    maps = extractor(x)
    assert len(maps) == len(stages)
    for ours, timms in zip(backbone(x), maps):
        torch.testing.assert_close(ours, timms)


def test_features_only_serves_as_timm_backbone_and_takes_hooks():
    model = MODELS.build(dict(type="TimmBackbone", model_name="uninet_tiny", out_indices=(2, 4, 5), with_cp=True))
    x = torch.randn(2, 3, 64, 64)
    sum(m.square().mean() for m in model.train()(x)).backward()
    assert model.channels == [40, 64, 96] and all(p.grad is not None for p in model.parameters())
    hooked = timm.create_model("uninet_tiny", features_only=True, out_indices=(1, 4), feature_cls="hook").eval()
    assert [m.shape[1] for m in hooked(x)] == hooked.feature_info.channels() == [24, 64]


def test_forward_intermediates_is_timms():
    model = timm.create_model("uninet_tiny").eval()
    x = torch.randn(1, 3, 64, 64)
    last, maps = model.forward_intermediates(x, indices=[1, 3])
    assert [m.shape[1] for m in maps] == [24, 64]
    torch.testing.assert_close(last, model.forward_features(x))
    assert model.forward_intermediates(x, indices=[1], stop_early=True)[0].shape[1] == 24
    with pytest.raises(ValueError, match="NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")


def test_classifier_and_backbone_have_the_same_tensor_names():
    names = set(UniNet("tiny").state_dict())
    head = {name for name in timm.create_model("uninet_tiny").state_dict() if name not in names}
    assert {name.split(".")[0] for name in head} == {"head_conv", "head_norm", "head"}
    assert names < set(timm.create_model("uninet_tiny").state_dict())
    # Names that published files have.
    assert {
        "stem.0.weight",
        "stem.1.running_mean",
        "stages.0.blocks.0.conv.weight",
        "stages.1.downsample.depthwise.weight",
        "stages.1.blocks.0.conv_exp.weight",
        "stages.4.downsample.key_value.weight",
        "stages.5.blocks.2.attention.qkv.weight",
        "stages.5.blocks.2.mlp_scale.gamma",
    } <= names


def test_the_users_init_cfg_comes_last():
    model = tiny(init_cfg=dict(type="Constant", layer="Linear", val=0.5))
    assert (model.stages[5].blocks[0].mlp.fc1.weight == 0.5).all()
    assert (model.stages[5].blocks[0].mlp_scale.gamma == 0.5).all()  # the layer_scale of `tiny`
