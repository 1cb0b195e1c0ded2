"""A micro-step on shapes has the live bytes of the real one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.planning.image_sizes import Size
from engine.planning.step_trace import LiveBytes

SIZE, OBJECTS = 128, 32  # as many objects as the tiny Mask R-CNN's sampler wants positives


def _config(detector: str, task: str, **changes):
    from engine.recipes.load import parse_config

    return parse_config(
        {
            "train_batch_size": 1,
            "detector": {"config": detector, **changes},
            "data": {"task": task, "dataset": "shapes"},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "schedule": {"steps": 1},
        }
    )


def test_live_bytes_follow_a_storage_to_its_end():
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a[10:] + 1  # a view is no storage of its own
        assert live.live == 400 + 360
        del a
        assert live.live == 360
        assert live.restart_peak() == 760 and live.peak == 360
        del b
    assert live.live == 0


def test_a_linear_chain_keeps_what_backward_needs():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    with LiveBytes(ignored=model.parameters()) as live:
        x = torch.zeros(8, 10)
        y = model(x).sum()
        assert live.live == 4 * (80 + 160 + 1)  # the input, ReLU's output, the sum; ReLU works on what it is given
        del y


def _real_peak(config, classes, samples) -> int:
    """Forward and backward of real tensors, gradients let go as the trace lets them go."""
    from engine.modeling.build import build_model
    from engine.tasks.registry import task_of

    model = build_model(task_of(config), classes)
    with LiveBytes(ignored=[*model.parameters(), *model.buffers()]) as live:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        images = torch.randn(1, 3, SIZE, SIZE)
        model.parse_losses(model.loss(images, samples))[0].backward()
    return live.peak


@pytest.mark.parametrize(
    "detector, task, changes",
    [
        ("tiny_retinanet", "detection", {}),
        ("tiny_mask_rcnn", "instance", {}),
        ("tiny_semantic_fpn", "semantic", {}),
        ("tiny_retinanet", "detection", {"checkpoint_activations": ["backbone"]}),
    ],
)
def test_the_traced_peak_is_the_real_one(detector, task, changes):
    from engine.planning.known_data import known_data, planned_classes
    from engine.planning.step_trace import build_shape_model, trace_step
    from engine.tasks.registry import task_of
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    config = _config(detector, task, **changes)
    classes = planned_classes(known_data(config))
    samples = task_of(config).stand_ins(classes, micro=1, height=SIZE, width=SIZE, objects=OBJECTS)
    model = build_shape_model(config, classes)
    trace = trace_step(model, config, classes, micro=1, size=Size(SIZE, SIZE), objects=OBJECTS)
    # A real RPN proposes other regions than the planned ones, so samplers take a few others.
    assert trace.peak == pytest.approx(_real_peak(config, classes, samples), rel=0.05)
    assert trace.kept <= trace.forward_peak <= trace.peak
    assert len(trace.gradients) == len({event.parameter for event in trace.gradients})


def test_a_classifier_is_planned():
    from engine.planning.plan import Plan

    config = _config("timm::resnet10t", "classification")
    plan = Plan(config, 1, fixed_size=Size(64, 64))
    memory = plan.memory()
    assert plan.model.total > 4_000_000 and plan.data.things == 6
    assert memory.peak > 4 * 2 * plan.model.total  # weights and gradients
    trace = plan.trace(Size(64, 64))
    assert 0 < trace.flops["forward"] < trace.flops["backward"]
    assert len(trace.gradients) == len(plan.model.parameters)


def test_flops_of_a_convolution_are_counted_forward_and_backward():
    from engine.planning.step_trace import operator_cost

    x, w = torch.zeros(2, 3, 8, 8), torch.zeros(5, 3, 3, 3)
    y = torch.nn.functional.conv2d(x, w, padding=1)
    arguments = (x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    flops, size, dtype = operator_cost(torch.ops.aten.convolution.default, arguments, {}, y)
    assert flops == 2 * 2 * 5 * 8 * 8 * 3 * 9
    assert size == 4 * (x.numel() + w.numel() + y.numel())
    assert dtype == "float32"
    assert operator_cost(torch.ops.aten.view.default, (x, [-1]), {}, x.view(-1)) is None


def test_recomputation_costs_a_second_forward_and_keeps_less():
    from engine.planning.known_data import known_data, planned_classes
    from engine.planning.step_trace import build_shape_model, trace_step
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    configs = [_config("tiny_retinanet", "detection", checkpoint_activations=names) for names in ([], ["backbone"])]
    classes = planned_classes(known_data(configs[0]))
    plain, again = (
        trace_step(build_shape_model(config, classes), config, classes, micro=1, size=Size(SIZE, SIZE))
        for config in configs
    )
    assert again.kept < plain.kept
    assert again.flops["forward"] == plain.flops["forward"]
    assert plain.flops["backward"] < again.flops["backward"] <= sum(plain.flops.values())
