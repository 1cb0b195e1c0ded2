"""phi per module on real detectors equals brute force: two backward passes over the two half batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from agvm_harness import Case, build, close

CONFIGS = {"faster": "faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", "mask": "mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"}


def detector(kind, small=True):
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.hub import get_config

    import models  # noqa: F401  (CPU kernels of mmcv's ops)

    register_all_modules()
    model = get_config(f"mmdet::{CONFIGS[kind]}").model
    model.backbone.init_cfg = None
    torch.manual_seed(0)
    if not small:
        return MODELS.build(model).train()
    model.backbone.update(depth=18, base_channels=16, frozen_stages=1)
    model.neck.update(in_channels=[16, 32, 64, 128], out_channels=32)
    model.rpn_head.update(in_channels=32, feat_channels=32)
    model.roi_head.bbox_roi_extractor.out_channels = 32
    model.roi_head.bbox_head.update(in_channels=32, fc_out_channels=64, num_classes=3)
    if kind == "mask":
        model.roi_head.mask_roi_extractor.out_channels = 32
        model.roi_head.mask_head.update(in_channels=32, conv_out_channels=32, num_convs=1, num_classes=3)
    return MODELS.build(model).train()


def sample(j):
    """Micro-batch j: one picture with two boxes and their masks."""
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    generator = torch.Generator().manual_seed(j)
    corners = torch.rand(2, 2, generator=generator) * 40
    boxes = torch.cat([corners, corners + 20 + torch.rand(2, 2, generator=generator) * 30], 1)
    masks = torch.zeros(2, 96, 96)
    for mask, (x, y, x2, y2) in zip(masks, boxes.int().tolist()):
        mask[y:y2, x:x2] = 1
    data = DetDataSample(
        metainfo=dict(
            img_shape=(96, 96),
            pad_shape=(96, 96),
            batch_input_shape=(96, 96),
            scale_factor=(1.0, 1.0),
            ori_shape=(96, 96),
        )
    )
    data.gt_instances = InstanceData(
        bboxes=boxes, labels=torch.tensor([j % 3, 1]), masks=BitmapMasks(masks.numpy().astype("uint8"), 96, 96)
    )
    return torch.randn(1, 3, 96, 96, generator=generator), [data]


def loss_of(model, j):
    torch.manual_seed(j)  # the samplers of RPN and box head draw at random
    pictures, samples = sample(j)
    losses = model(pictures, samples, mode="loss")
    return getattr(model, "module", model).parse_losses(losses)[0]


def brute_force(model, modules, total, rule):
    halves = []
    for half in (0, 1):
        middle = (total + 1) // 2
        members = range(middle, total) if half else range(middle)
        model.zero_grad()
        (sum(loss_of(model, j) for j in members) / len(members)).backward()
        halves.append(
            {
                name: torch.cat(
                    [
                        p.grad.flatten().double()
                        for n, p in model.named_parameters()
                        if p.grad is not None and any(n.startswith(f"{x}.") for x in prefixes)
                    ]
                )
                for name, prefixes in modules.items()
            }
        )
    n1, n2 = (total + 1) // 2, total // 2
    phi = {}
    for name in modules:
        G1, G2 = (half[name] for half in halves)
        D = 1.0 if rule == "sgd" else 1 / (0.001 * ((n1 * G1 + n2 * G2) / total).square() + 1e-8).sqrt()
        phi[name] = float(1 - torch.nn.functional.cosine_similarity(D * G1, D * G2, dim=0))
    return phi


def measure(kind, stage, accumulation, rule, small=True):
    from engine.optim import detector_modules

    model = detector(kind, small)
    plain = copy.deepcopy(model)
    modules = detector_modules(model)
    bucket = 100_000 if small else 4_000_000
    case = Case(
        stage, accumulation, rule=rule, bucket_size=bucket, agvm={"tau": 1}, zero={"reduce_bucket_size": 5 * bucket}
    )
    engine, optimizer = build(case, model, modules=modules)
    world = dist.get_world_size()
    for k in range(accumulation):
        engine.backward(loss_of(engine, k * world + dist.get_rank()))
        engine.step()
    phi = optimizer.phi
    close(engine, optimizer)
    return phi, brute_force(plain, modules, world * accumulation, rule) if dist.get_rank() == 0 else None


def measure_all(cases):
    return [measure(*case) for case in cases]


@pytest.mark.parametrize(
    "world, cases",
    [
        (2, [("faster", 2, 1, "sgd"), ("mask", 3, 1, "adamw"), ("mask", 0, 2, "sgd"), ("faster", 1, 2, "adamw")]),
        # mmdet's R50 models as they are
        pytest.param(
            2,
            [("faster", 2, 1, "sgd", False), ("mask", 3, 1, "adamw", False)],
            marks=pytest.mark.exhaustive,
        ),
        (3, [("mask", 2, 1, "sgd")]),
    ],
)
def test_phi_on_faster_and_mask_rcnn_is_that_of_two_backward_passes(ranks, world, cases):
    for case, (phi, expected) in zip(cases, ranks.run(measure_all, world, cases)[0]):
        heads = {"bbox_head", "mask_head"} if case[0] == "mask" else {"bbox_head"}
        assert set(phi) == {"backbone", "neck", "rpn_head"} | heads
        assert phi == pytest.approx(expected, rel=1e-5), case
