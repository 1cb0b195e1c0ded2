"""One micro-step of the real model on shapes: what is alive when, and how much is computed.

Parameters and images are fake tensors, the ground truth is real. So the detector's own `loss` runs unchanged: anchors,
targets and sampling are computed, and every tensor that is computed from a pixel is only a shape. Two things that would
need pixel values are replaced: the proposals of an RPN (as many as its config allows, half of them on objects, so that
samplers find all the positives they want: the most that a step can need), and the boxes that a cascade hands on (kept).

An operator costs floating-point operations, by torch's own formulas (matrix products, convolutions, attention) and ours
for torchvision's kernels and CPU attention, and the bytes that it reads and writes. Without a formula (norms, sums) it
costs its bytes alone. A view costs nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from engine.config import RunConfig
from engine.data.types import Classes
from engine.errors import UserError, first_line
from engine.modeling.build import build_model
from engine.modeling.precision import Precision
from engine.modeling.progress import Progress, tell
from engine.planning.image_sizes import Size
from engine.tasks.registry import task_of
from engine.tasks.stand_ins import InstanceData, proposals_near
from models.normaliser import normalised

DEVICE = torch.device("cpu")  # of fake tensors: they have no memory, but operators ask where they are
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_")
_ONLY_ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_COLLECTIVES = {"allreduce_": "all_reduce"}  # what batch norm over all ranks calls
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_SAMPLES = 4  # in a bin of RoIAlign, where the config leaves it to the size of the region


class Cost(NamedTuple):
    """Of one operator: floating-point operations, bytes it reads and writes, and the type it computes in."""

    flops: int
    bytes: int
    dtype: str


def operator_cost(function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Cost | None:
    """None for what does no work."""
    outputs, inputs = _tensors(result), _tensors((args, kwargs))
    if not function._schema.is_mutable:
        mine = {t.untyped_storage()._cdata for t in inputs}
        outputs = [t for t in outputs if t.untyped_storage()._cdata not in mine]
    if not outputs or str(function.overloadpacket).removeprefix("aten.") in _ONLY_ALLOCATES:
        return None
    main = max((t for t in (*inputs, *outputs) if t.is_floating_point()), key=Tensor.numel, default=outputs[0])
    packet = function.overloadpacket
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    else:
        flops = _OWN[str(packet)](args, result) if str(packet) in _OWN else 0
    return Cost(int(flops), count_bytes([*inputs, *outputs]), str(main.dtype).removeprefix("torch."))


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def count_bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(values))


def _deform_conv(products: int, samples: int, x: Tensor, weight: Tensor, output: Tensor) -> int:
    """Every tap is sampled bilinearly (about 10 operations a value) and multiplied with the weight."""
    positions = output.shape[0] * output.shape[2] * output.shape[3]
    taps = weight.shape[2] * weight.shape[3]
    return products * positions * weight.numel() + samples * positions * taps * x.shape[1]


_OWN: dict[str, Callable[[Any, Any], int]] = {
    "torchvision.deform_conv2d": lambda args, result: _deform_conv(2, 10, args[0], args[1], result),
    "torchvision._deform_conv2d_backward": lambda args, _: _deform_conv(4, 30, args[1], args[2], args[0]),
    "torchvision.roi_align": lambda args, result: 8 * _SAMPLES * result.numel(),
    "torchvision._roi_align_backward": lambda args, _: 8 * _SAMPLES * args[0].numel(),
    _ATTENTION: lambda args, _: sdpa_flop_count(*(t.shape for t in args[:3])),
    f"{_ATTENTION}_backward": lambda args, _: sdpa_backward_flop_count(*(t.shape for t in args[:4])),
}


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operator that made it to its end. `live` is now, `peak` since `restart_peak`.

    Real and fake tensors are counted by the same rule. Storages of `ignored` do not count. What a kernel allocates and
    frees inside itself (a convolution's workspace) is not seen.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._references: dict[int, weakref.ref] = {}
        for tensor in ignored:
            self.follow(tensor, counts=False)

    def follow(self, tensor: Tensor, *, counts: bool = True) -> None:
        """Also for a tensor that no operator made while the mode was on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        size = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            del self._references[key]
            self.live -= size

        self._references[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def follow_all(self) -> None:
        """Count every tensor that the garbage collector knows now."""
        gc.collect()
        for item in gc.get_objects():
            if issubclass(type(item), Tensor) and item.device.type != "meta":  # isinstance makes some proxies warn
                self.follow(item)

    def restart_peak(self) -> int:
        """The peak so far; from here on it is that of what follows."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(function, args, kwargs or {})
        for tensor in _tensors(result):
            self.follow(tensor)
        return result

    def run(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


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
    def flops(self) -> dict[str, int]:
        """Forward and backward, with what is computed a second time under activation checkpointing."""
        costs = dict(forward=self.forward, backward=self.backward)
        return {name: sum(cost.flops * count for cost, count in part.items()) for name, part in costs.items()}


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


def _as_numbers(indices: Any) -> list[Any]:
    found: list[Any] = []
    for index in indices:
        real_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        found.extend(index.nonzero(as_tuple=True) if real_mask else [index])
    return found


def trace_step(
    model: Any, config: RunConfig, classes: Classes, *, micro: int, size: Size, objects: int = 7
) -> StepTrace:
    """Trace `build_shape_model`'s model, once, on `micro` images of one size with `objects` objects each."""
    precision, parameters = Precision.of(config.deepspeed), list(model.parameters())
    mode = parameters[0].fake_mode
    samples = task_of(config).stand_ins(classes, micro=micro, height=size.height, width=size.width, objects=objects)
    _replace_what_needs_pixels(model, samples)
    images = FakeTensor(mode, torch.empty(micro, 3, *size, dtype=precision.dtype, device="meta"), DEVICE)
    events: list[GradientEvent] = []
    with _Shapes(model, mode) as live:

        def ready(place: int, parameter: Tensor) -> None:
            events.append(GradientEvent(place, count_bytes(parameter.grad), live.restart_peak()))
            parameter.grad = None  # where it stays depends on the ZeRO stage
            live.restart_peak()

        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(ready, place))
        live.follow(images)
        try:
            tell(Progress(step=0, steps=1, steps_per_epoch=1, seed=config.run.seed))
            over_ranks = config.detector.normaliser == "ranks"
            with precision.autocast(DEVICE), normalised(over_ranks=over_ranks):
                loss = model.parse_losses(model.loss(images, samples))[0].float()
            kept, forward_peak = live.live, live.restart_peak()
            forward, live.costs = live.costs, Counter()
            loss.backward()
        except Exception as error:  # a detector may look at pixel values in ways that nobody has foreseen
            raise UserError(
                f'detector "{config.detector.config}" cannot be planned, because its loss needs values of '
                f"pixels where only shapes are known ({type(error).__name__}: {first_line(error)[:160]})"
            ) from error
        tail = live.restart_peak()
    return StepTrace(micro, size, kept, forward_peak, events, tail, forward, live.costs, live.collectives)


def _replace_what_needs_pixels(model: Any, samples: list[Any]) -> None:
    rpn = getattr(model, "rpn_head", None)
    if rpn is not None:
        rpn.predict_by_feat = lambda *maps, cfg, **_: [proposals_near(s, int(cfg.max_per_img)) for s in samples]
    for module in model.modules():
        if hasattr(module, "refine_bboxes"):
            module.refine_bboxes = lambda sampled, *_: [InstanceData(bboxes=sample.priors) for sample in sampled]
