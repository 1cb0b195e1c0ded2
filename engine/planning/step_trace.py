"""One micro-step of the real model on shapes: what is alive when, and how much is computed.

Parameters and images are fake tensors, the ground truth is real. So the detector's own `loss` runs unchanged: anchors,
targets and sampling are computed, and every tensor that is computed from a pixel is only a shape. Two things that would
need pixel values are replaced: the proposals of an RPN (as many as its config allows, half of them on objects, so that
samplers find as many positives as they want: the most that a step can need) and the boxes that a cascade hands to its next
stage (unchanged).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from engine.config import RunConfig
from engine.data.types import Classes
from engine.errors import UserError, first_line
from engine.modeling.build import build_model
from engine.modeling.precision import Precision
from engine.planning.image_sizes import Size
from engine.planning.operators import Cost, LiveBytes, count_bytes, operator_cost
from engine.tasks.registry import task_of
from engine.tasks.stand_ins import InstanceData, proposals_near

DEVICE = torch.device("cpu")  # of fake tensors: they have no memory, but operators ask where they are
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
_COLLECTIVES = {"allreduce_": "all_reduce"}  # what batch norm over all ranks calls


class GradientEvent(NamedTuple):
    """A parameter's gradient is ready; `peak` is that of live bytes since the gradient before, this one included."""

    parameter: int  # its place in `model.parameters()`
    bytes: int
    peak: int


@dataclass
class StepTrace:
    """A micro-step. Bytes are without parameters, buffers and the gradients of parameters that are ready."""

    micro: int
    size: Size
    kept: int  # alive when forward ends: what is kept for backward
    forward_peak: int
    gradients: list[GradientEvent]
    backward_tail: int  # the peak after the last gradient
    forward: Counter[Cost]
    backward: Counter[Cost]
    # (operation, payload bytes) of the model itself: statistics of batch norms over all ranks
    collectives: Counter[tuple[str, int]]

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


class _NumbersStayReal(TorchFunctionMode):
    """Swin and others take their stochastic depth from a linspace and read its values while they are built."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if function is torch.linspace else {})})


def build_empty_model(config: RunConfig, classes: Classes) -> nn.Module:
    """The model of a run without weights, and whole: partitioned from the start it has the same shards."""
    detector = config.detector.model_copy(update={"load_from": None, "zero_init": False})
    return build_model(task_of(config.model_copy(update={"detector": detector})), classes, empty=True)


def build_shape_model(config: RunConfig, classes: Classes) -> nn.Module:
    """The model of a run, cast to its type, with fake tensors as parameters. Real tensors may be mixed in."""
    with torch.device("meta"), _NumbersStayReal():
        model = build_empty_model(config, classes)
    model.to(Precision.of(config.deepspeed).dtype)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, nn.Parameter] = {}  # a shared parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(FakeTensor(mode, parameter.data, DEVICE), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = FakeTensor(mode, buffer, DEVICE)
    return model


class _Shapes(LiveBytes):
    """Follows live bytes, counts costs, and lets a real mask pick from a fake tensor."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        super().__init__(ignored=[*model.parameters(), *model.buffers()])
        self.mode = mode
        self.costs: Counter[Cost] = Counter()
        self.collectives: Counter[tuple[str, int]] = Counter()

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and name in _INDEXING and isinstance(args[0], FakeTensor):
            # How many elements a mask picks is known where the mask is real: as numbers it gives a shape.
            args = (args[0], _as_numbers(args[1]), *args[2:])
        if function.namespace == "c10d":
            self.collectives[_COLLECTIVES[name], count_bytes(args[0])] += 1
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            # Straight to the mode: entering it for every operator, as a fake tensor does, takes a third of the time.
            result = self.mode.dispatch(function, (), args, kwargs)
        else:
            result = function(*args, **kwargs)
        if function.namespace in ("aten", "torchvision"):
            cost = operator_cost(function, args, kwargs, result)
            if cost is not None:
                self.costs[cost] += 1
        return result

    def take_costs(self) -> Counter[Cost]:
        costs, self.costs = self.costs, Counter()
        return costs


def _as_numbers(indices: Any) -> list[Any]:
    found: list[Any] = []
    for index in indices:
        real_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        found.extend(index.nonzero(as_tuple=True) if real_mask else [index])
    return found


def trace_step(
    model: Any, config: RunConfig, classes: Classes, *, micro: int, size: Size, objects: int = 7
) -> StepTrace:
    """Trace `build_shape_model`'s model on `micro` images of one size with `objects` objects each."""
    precision, parameters = Precision.of(config.deepspeed), list(model.parameters())
    mode = parameters[0].fake_mode
    samples = task_of(config).stand_ins(classes, micro=micro, height=size.height, width=size.width, objects=objects)
    _replace_what_needs_pixels(model, samples)
    images = FakeTensor(mode, torch.empty(micro, 3, *size, dtype=precision.dtype, device="meta"), DEVICE)
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
    return StepTrace(micro, size, kept, forward_peak, events, tail, forward, backward, live.collectives)


def _gradient_event(live: LiveBytes, events: list[GradientEvent], place: int) -> Any:
    def hook(parameter: Tensor) -> None:
        events.append(GradientEvent(place, count_bytes(parameter.grad), live.restart_peak()))
        parameter.grad = None  # where it stays depends on the ZeRO stage
        live.restart_peak()

    return hook


def _replace_what_needs_pixels(model: Any, samples: list[Any]) -> None:
    rpn = getattr(model, "rpn_head", None)
    if rpn is not None:
        rpn.predict_by_feat = lambda *maps, cfg, **_: [proposals_near(s, int(cfg.max_per_img)) for s in samples]
    for module in model.modules():
        if hasattr(module, "refine_bboxes"):
            module.refine_bboxes = lambda sampled, *_: [InstanceData(bboxes=sample.priors) for sample in sampled]
