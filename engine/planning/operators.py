"""What an operator costs, and the bytes of the tensors that operators leave alive.

Costs: floating-point operations by torch's own formulas, and the bytes that are read and written. torch's counter knows
matrix products, convolutions (grouped and transposed ones too) and attention. The formulas of torchvision's kernels and of
CPU attention are added here. An operator without a formula (norms, activations, sums) costs its bytes alone. A view costs
nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ONLY_ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
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
    flops = _flops(function.overloadpacket, args, kwargs, result)
    return Cost(flops, count_bytes([*inputs, *outputs]), str(main.dtype).removeprefix("torch."))


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def count_bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors(values))


def _flops(packet: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    own = _OWN.get(str(packet))
    return 0 if own is None else int(own(args, result))


def _deform_conv(x: Tensor, weight: Tensor, output: Tensor, *, products: int, samples: int) -> int:
    """Every tap is sampled bilinearly (about 10 operations a value) and multiplied with the weight."""
    positions = output.shape[0] * output.shape[2] * output.shape[3]
    taps = weight.shape[2] * weight.shape[3]
    return products * positions * weight.numel() + samples * positions * taps * x.shape[1]


_OWN: dict[str, Callable[[Any, Any], int]] = {
    "torchvision.deform_conv2d": lambda args, result: _deform_conv(*args[:2], result, products=2, samples=10),
    "torchvision._deform_conv2d_backward": lambda args, _: _deform_conv(*args[1:3], args[0], products=4, samples=30),
    "torchvision.roi_align": lambda args, result: 8 * _SAMPLES * result.numel(),
    "torchvision._roi_align_backward": lambda args, _: 8 * _SAMPLES * args[0].numel(),
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda args, _: sdpa_flop_count(*(t.shape for t in args[:3])),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda args, _: sdpa_backward_flop_count(
        *(t.shape for t in args[:4])
    ),
}


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operator that made it to its end. `live` is now, `peak` since `restart_peak`.

    It sees real, fake and meta tensors alike, so the planner's trace and a measured step are counted by the same rule.
    Storages of `ignored` do not count. What a kernel allocates and frees inside itself (a convolution's workspace) is not
    seen.
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
