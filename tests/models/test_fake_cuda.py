"""On CUDA nothing mixes devices: losses of the zoo's detectors, and kernels, on tensors that torch takes for CUDA's."""

from pathlib import Path

import pytest
import torch
from fake_cuda import FakeCuda, fake_cuda, to_fake_cuda
from tiny_run import merged

import models.zoo
from models import mmcv_kernels

mmcv_kernels.install()  # before the first import of mmcv.ops

TASKS = {
    "micro_faster_rcnn": "detection",
    "tiny_dino": "detection",
    "tiny_faster_rcnn": "detection",
    "tiny_mask_rcnn": "instance",
    "tiny_panoptic_fpn": "panoptic",
    "tiny_retinanet": "detection",
    "tiny_semantic_fpn": "semantic",
    "uninet_tiny_htcx": "instance",
}
# Widths of the same parts, and Swin.
LARGE = {
    "faster_rcnn_swin_t": "detection",
    "panoptic_fpn_swin_t": "panoptic",
    "semantic_fpn_r18": "semantic",
    "semantic_fpn_r50": "semantic",
    "semantic_fpn_swin_t": "semantic",
    "uninet_b1_htcx": "instance",
}
# Operators really run here, and these have over a billion weights. Their parts are those of uninet_tiny_htcx.
TOO_LARGE = {"uninet_g_htcx", "uninet_g_htcx_o365"}


def test_the_whole_zoo_is_listed():
    zoo = {path.stem for path in Path(models.zoo.__file__).parent.glob("[a-z]*.py")}
    assert zoo == {*TASKS, *LARGE, *TOO_LARGE}


def test_mixed_devices_raise():
    with fake_cuda():
        there, here = torch.ones(2, device="cuda"), torch.ones(2)
        assert there.device.type == "cuda" and (there + there).device.type == "cuda" and here.device.type == "cpu"
        assert torch.equal((there + torch.tensor(1.0)).cpu(), torch.full((2,), 2.0))  # a number may come from the CPU
        assert there[torch.tensor([0])].device.type == "cuda" and there.nonzero().tolist() == [[0], [1]]
        for mix in (lambda: there + here, lambda: torch.cat([here, there]), lambda: here[there.long()]):
            with pytest.raises((RuntimeError, AssertionError)):
                mix()


def loss_on_fake_cuda(name, task_name):
    from engine.config.origin import Origin
    from engine.data.types import Classes
    from engine.modeling.build import build_model
    from engine.modeling.progress import Progress, tell
    from engine.recipes.load import parse_config
    from engine.tasks.registry import task_of
    from models.normaliser import normalised

    config = parse_config(
        merged({"detector": {"config": name, "options": {}}, "data": {"task": task_name}}), origin=Origin.USER
    )
    stuff = ("sky",) if task_name == "panoptic" else ()
    classes = Classes(("cat", "dog", "cow"), stuff, tuple(range(3 + len(stuff))))
    task = task_of(config)
    model = build_model(task, classes)
    samples = task.stand_ins(classes, micro=1, height=64, width=96, objects=3)
    tell(Progress(step=0, steps=1, steps_per_epoch=1, seed=0))
    with torch.no_grad(), fake_cuda(), normalised(over_ranks=False):
        to_fake_cuda(model)
        images = torch.randn(1, 3, 64, 96, device="cuda")
        return model.parse_losses(model.loss(images, [sample.to("cuda") for sample in samples]))[0]


@pytest.mark.parametrize(
    "name", [*TASKS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in LARGE)], ids=str
)
def test_the_loss_of_a_detector(name):
    loss = loss_on_fake_cuda(name, {**TASKS, **LARGE}[name])
    assert isinstance(loss, FakeCuda) and bool(loss.values.isfinite())


def maps(*shape):
    return torch.randn(*shape, device="cuda")


def rois():
    return torch.tensor([[0.0, 1.0, 1.0, 6.0, 7.0], [0.0, 0.0, 2.0, 5.0, 5.0]], device="cuda")


def boxes():
    return rois()[:, 1:]


def attention(ops):
    return ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction.apply(
        maps(1, 20, 2, 4),
        torch.tensor([[4, 4], [2, 2]], device="cuda"),
        torch.tensor([0, 16], device="cuda"),
        maps(1, 3, 2, 2, 2, 2).sigmoid(),
        maps(1, 3, 2, 2, 2),
        64,
    )


KERNELS = {
    "attention": attention,
    "nms": lambda ops: ops.nms(boxes(), maps(2), 0.5),
    "batched_nms": lambda ops: ops.batched_nms(
        boxes(), maps(2), torch.zeros(2, dtype=torch.long, device="cuda"), dict(type="nms", iou_threshold=0.5)
    ),
    "bbox_overlaps": lambda ops: ops.bbox_overlaps(boxes(), boxes()),
    "carafe_naive": lambda ops: ops.carafe_naive(maps(1, 4, 4, 4), maps(1, 25, 8, 8).softmax(1), 5, 1, 2),
    "carafe": lambda ops: ops.carafe(maps(1, 4, 4, 4), maps(1, 25, 8, 8).softmax(1), 5, 1, 2),
    "deform_conv2d": lambda ops: ops.deform_conv2d(maps(1, 4, 8, 8), maps(1, 18, 8, 8), maps(4, 4, 3, 3), 1, 1),
    "modulated_deform_conv2d": lambda ops: ops.modulated_deform_conv2d(
        maps(1, 4, 8, 8), maps(1, 18, 8, 8), maps(1, 9, 8, 8), maps(4, 4, 3, 3), maps(4), 1, 1
    ),
    "sigmoid_focal_loss": lambda ops: ops.sigmoid_focal_loss(
        maps(5, 3), torch.tensor([0, 1, 2, 3, 0], device="cuda"), 2.0, 0.25, None, "sum"
    ),
    "softmax_focal_loss": lambda ops: ops.softmax_focal_loss(
        maps(5, 3), torch.tensor([0, 1, 2, 1, 0], device="cuda"), 2.0, 0.25, None, "sum"
    ),
    "roi_align": lambda ops: ops.roi_align(maps(1, 4, 8, 8), rois(), 2, 1.0, 0, "avg", True),
    "roi_align, max": lambda ops: ops.roi_align(maps(1, 4, 8, 8), rois(), 2, 1.0, 2, "max", True),
    "roi_pool": lambda ops: ops.roi_pool(maps(1, 4, 8, 8), rois(), 2, 1.0),
    "deform_roi_pool": lambda ops: ops.deform_roi_pool(maps(1, 4, 8, 8), rois(), maps(2, 2, 2, 2), 2, 1.0, 2, 0.1),
    "masked_conv2d": lambda ops: ops.masked_conv2d(
        maps(1, 4, 8, 8), torch.ones(1, 8, 8, device="cuda"), maps(4, 4, 3, 3), maps(4), 1
    ),
    "soft_nms": lambda ops: ops.soft_nms(boxes(), maps(2).sigmoid()),
    "point_sample": lambda ops: ops.point_sample(maps(1, 4, 8, 8), maps(1, 5, 2).sigmoid()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_mmcv(name):
    """Left out: `nms_match`, which returns lists from the host; mmcv's SyncBN, which `Fp32BatchNorm` replaces."""
    import mmcv.ops

    with torch.no_grad(), fake_cuda():
        result = KERNELS[name](mmcv.ops)
    parts = result if isinstance(result, tuple) else (result,)
    assert all(isinstance(part, FakeCuda) for part in parts)
