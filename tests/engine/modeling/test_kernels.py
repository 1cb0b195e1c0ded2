"""TF32, channels last and a compiled backbone: results are those of the plain model."""

import shutil

import pytest
import torch
from tiny_run import difference, merged, train_tiny

from engine.errors import ConfigError
from engine.modeling.kernels import compile_backbone, use_channels_last, use_tf32
from models.batch_norm import Fp32BatchNorm


def runs(cases):
    return [train_tiny(changes) for changes in cases]


def orders_in_memory(changes):
    """Train with a look at the maps that leave the backbone."""
    from mmdet.models.backbones import ResNet

    seen, plain = [], ResNet.forward

    def forward(self, x):
        maps = plain(self, x)
        seen.extend(m.is_contiguous(memory_format=torch.channels_last) for m in maps if not m.is_meta)
        return maps

    ResNet.forward = forward
    try:
        return train_tiny(changes), seen
    finally:
        ResNet.forward = plain


def each_order(cases):
    return [orders_in_memory(changes) for changes in cases]


def test_channels_last_reaches_the_same_weights_at_every_stage(ranks):
    last = {"detector": {"channels_last": True}, "schedule": {"steps": 2}}
    cases = [merged({"detector": {"channels_last": False}}, last)]
    cases += [merged({"zero_optimization": {"stage": stage}}, last) for stage in (0, 1, 2, 3)]
    (plain, order), *others = ranks.run(each_order, 2, cases)[0]
    assert order and not any(order)
    for result, order in others:
        assert order and all(order)
        assert difference(plain["weights"], result["weights"]) < 1e-5


@pytest.mark.exhaustive  # half a minute of the compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_a_compiled_backbone_reaches_the_same_weights(ranks):
    shared = {"data": {"train_scales": None}, "schedule": {"steps": 2}, "train_batch_size": 2}
    compiled = {"detector": {"compile_backbone": True}}
    cases = [merged({**compiled, "zero_optimization": {"stage": stage}}, shared) for stage in (0, 1, 2)]
    plain, *others = ranks.run(runs, 2, [shared, *cases])[0]
    for result in others:
        assert difference(plain["weights"], result["weights"]) < 1e-5
        for mine, theirs in zip(result["records"], plain["records"]):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize("settings, reason", [((3, False), "ZeRO-3"), ((2, True), "checkpoint_activations")])
def test_a_compiled_backbone_is_refused_where_it_does_not_work(settings, reason):
    model = torch.nn.Module()
    model.backbone = torch.nn.Conv2d(3, 4, 1)
    stage, recomputed = settings
    with pytest.raises(ConfigError, match=reason):
        compile_backbone(model, stage=stage, recomputed=recomputed)
    model.backbone = Fp32BatchNorm(4)
    model.backbone.synchronise = True
    with pytest.raises(ConfigError, match="sync_bn"):
        compile_backbone(model, stage=0, recomputed=False)
    with pytest.raises(ConfigError, match="needs a detector with a backbone"):
        use_channels_last(torch.nn.Module())


def test_tf32_is_set_on_cuda_and_nothing_on_the_cpu():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        assert use_tf32(True, torch.device("cpu")) is None
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
        for enabled, name in ((True, "high"), (False, "highest")):
            assert ("TF32" if enabled else "in fp32") in use_tf32(enabled, torch.device("cuda"))
            assert torch.get_float32_matmul_precision() == name
            assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is enabled
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
