"""One micro-step of the real model on shapes: what is alive when, and how much is computed.

The images are fake tensors, the ground truth is real. So the detector's own `loss` runs as it stands: anchors, targets and
sampling are computed, and every tensor that comes of a pixel is a shape. Two things that would need pixel values are put
in their place: the proposals of an RPN (as many as its config allows, half of them on objects, so that samplers find as many
positives as they want: the most that a step can need) and the boxes that a cascade hands to its next stage (unchanged).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from engine.config import RunConfig
from engine.data.types import Classes
from engine.errors import UserError, first_line
from engine.modeling.precision import Precision
from engine.planning.live_bytes import LiveBytes
from engine.planning.operator_cost import operator_cost
from engine.planning.shape_model import DEVICE, build_shape_model
from engine.tasks.registry import task_of
from engine.tasks.stand_ins import proposals_near

_INDEXING = (
    torch.ops.aten.index,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._unsafe_index_put,
    torch.ops.aten._index_put_impl_,
)


_NAMES = {"allreduce_": "all_reduce"}  # what batch norm over all ranks calls

Sent = tuple[str, int]  # an operation and its payload in bytes


class Cost(NamedTuple):
    """Of one operator: floating-point operations, bytes it reads and writes, and the type it computes in."""

    flops: int
    bytes: int
    dtype: str


class GradientEvent(NamedTuple):
    """A parameter's gradient is ready; `peak` is that of live bytes since the gradient before, this one included."""

    parameter: int  # its place in `model.parameters()`
    bytes: int
    peak: int


@dataclass
class StepTrace:
    """A micro-step. Bytes are without parameters, buffers and the gradients of parameters that are ready."""

    micro: int
    height: int
    width: int
    kept: int  # alive when forward ends: what is kept for backward
    forward_peak: int
    gradients: list[GradientEvent]
    backward_tail: int  # the peak after the last gradient
    forward: Counter[Cost]
    backward: Counter[Cost]
    collectives: Counter[Sent]  # of the model itself: statistics of batch norms over all ranks

    @property
    def peak(self) -> int:
        """Of live bytes over forward and backward."""
        return max(self.forward_peak, self.backward_tail, *(event.peak for event in self.gradients))

    @property
    def forward_flops(self) -> int:
        return sum(cost.flops * count for cost, count in self.forward.items())

    @property
    def backward_flops(self) -> int:
        """With what is computed a second time under activation checkpointing."""
        return sum(cost.flops * count for cost, count in self.backward.items())


class _Shapes(LiveBytes):
    """Follows live bytes, counts costs, and lets a real mask pick from a fake tensor."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        super().__init__(ignored=[*model.parameters(), *model.buffers()])
        self.mode = mode
        self.costs: Counter[Cost] = Counter()
        self.collectives: Counter[Sent] = Counter()

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if function.overloadpacket in _INDEXING and isinstance(args[0], FakeTensor):
            # How many a mask picks is known where the mask is real, and a shape where it is given as numbers.
            args = (args[0], _as_numbers(args[1]), *args[2:])
        leaves = tree_leaves((args, kwargs))
        if function.namespace == "c10d":
            self.collectives[_NAMES[function.overloadpacket.__name__], _bytes(args[0])] += 1
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            # Straight to the mode: entering it for every operator, as a fake tensor does, takes a third of the time.
            result = self.mode.dispatch(function, (), args, kwargs)
        else:
            result = function(*args, **kwargs)
        if function.namespace in ("aten", "torchvision"):
            cost = operator_cost(function, args, kwargs, result)
            if cost is not None:
                self.costs[Cost(*cost)] += 1
        return result

    def take_costs(self) -> Counter[Cost]:
        costs, self.costs = self.costs, Counter()
        return costs


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _as_numbers(indices: Any) -> list[Any]:
    found: list[Any] = []
    for index in indices:
        real_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        found.extend(index.nonzero(as_tuple=True) if real_mask else [index])
    return found


def trace_step(
    config: RunConfig, classes: Classes, *, micro: int, height: int, width: int, objects: int = 7
) -> StepTrace:
    """Trace a micro-batch of `micro` images of one size with `objects` objects each."""
    model, mode = build_shape_model(config, classes)
    return trace_model(model, mode, config, classes, micro=micro, height=height, width=width, objects=objects)


def trace_model(
    model: nn.Module,
    mode: FakeTensorMode,
    config: RunConfig,
    classes: Classes,
    *,
    micro: int,
    height: int,
    width: int,
    objects: int = 7,
) -> StepTrace:
    precision = Precision.of(config.deepspeed)
    samples = task_of(config).stand_ins(classes, micro=micro, height=height, width=width, objects=objects)
    _replace_what_needs_pixels(model, samples)
    images = FakeTensor(mode, torch.empty(micro, 3, height, width, dtype=precision.dtype, device="meta"), DEVICE)
    parameters = list(model.parameters())
    events: list[GradientEvent] = []
    with _Shapes(model, mode) as live:
        handles = [
            p.register_post_accumulate_grad_hook(_gradient_event(live, events, i))
            for i, p in enumerate(parameters)
            if p.requires_grad
        ]
        live.follow(images)
        try:
            with precision.autocast(DEVICE):
                loss = model.parse_losses(model.loss(images, samples))[0].float()
            kept, forward_peak, forward = live.live, live.restart_peak(), live.take_costs()
            loss.backward()
        except Exception as error:  # a detector may look at pixel values in ways that nobody has foreseen
            raise UserError(
                f'detector "{config.detector.config}" cannot be planned, because its loss needs values of '
                f"pixels where only shapes are known ({type(error).__name__}: {first_line(error)[:160]})"
            ) from error
        tail, backward = live.restart_peak(), live.take_costs()
        for handle in handles:
            handle.remove()
    return StepTrace(micro, height, width, kept, forward_peak, events, tail, forward, backward, live.collectives)


def _gradient_event(live: LiveBytes, events: list[GradientEvent], place: int) -> Any:
    def hook(parameter: Tensor) -> None:
        size = parameter.grad.numel() * parameter.grad.element_size()
        events.append(GradientEvent(place, size, live.restart_peak()))
        parameter.grad = None  # where it stays is the ZeRO stage's business
        live.restart_peak()

    return hook


def _replace_what_needs_pixels(model: nn.Module, samples: list[Any]) -> None:
    rpn = getattr(model, "rpn_head", None)
    if rpn is not None:
        rpn.predict_by_feat = lambda *maps, cfg, **_: [proposals_near(s, int(cfg.max_per_img)) for s in samples]
    for module in model.modules():
        if hasattr(module, "refine_bboxes"):
            module.refine_bboxes = _same_boxes


def _same_boxes(sampled: list[Any], *_: Any) -> list[Any]:
    from mmengine.structures import InstanceData

    return [InstanceData(bboxes=sample.priors) for sample in sampled]
