"""What an operator costs: floating-point operations by torch's own formulas, and the bytes it has to read and write.

torch's counter knows matrix products, convolutions (grouped and transposed ones too) and attention. The formulas of our
kernels on torchvision and of CPU attention are added here. An operator without a formula (norms, activations, sums) costs
its bytes alone. A view costs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def operator_cost(function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> tuple[int, int, str] | None:
    """(flops, bytes, type), or None for what does no work."""
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    if not outputs:
        return None
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not function._schema.is_mutable:
        mine = {t.untyped_storage()._cdata for t in inputs}
        outputs = [t for t in outputs if t.untyped_storage()._cdata not in mine]
        if not outputs or function.overloadpacket in _ONLY_ALLOCATES:
            return None
    size = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    main = max((t for t in (*inputs, *outputs) if t.is_floating_point()), key=Tensor.numel, default=outputs[0])
    return _flops(function, args, kwargs, result), size, str(main.dtype).removeprefix("torch.")


_ONLY_ALLOCATES = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
)


def _flops(function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    packet = function.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    own = _OWN.get(str(packet))
    return 0 if own is None else int(own(args, result))


def _deform_conv(args: Any, result: Tensor) -> int:
    """Every tap is sampled bilinearly (about 10 operations a value) and multiplied with the weight."""
    _, weight = args[:2]
    positions = result.shape[0] * result.shape[2] * result.shape[3]
    taps = weight.shape[2] * weight.shape[3]
    return 2 * positions * weight.numel() + 10 * positions * taps * args[0].shape[1]


def _deform_conv_backward(args: Any, result: Any) -> int:
    gradient, x, weight = args[:3]
    positions = gradient.shape[0] * gradient.shape[2] * gradient.shape[3]
    taps = weight.shape[2] * weight.shape[3]
    return 4 * positions * weight.numel() + 30 * positions * taps * x.shape[1]


_SAMPLES = 4  # in a bin of RoIAlign, where the config leaves it to the size of the region


def _roi_align(args: Any, result: Tensor) -> int:
    return 8 * _SAMPLES * result.numel()


def _roi_align_backward(args: Any, result: Tensor) -> int:
    return 8 * _SAMPLES * args[0].numel()


def _attention(args: Any, result: Any) -> int:
    return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)


def _attention_backward(args: Any, result: Any) -> int:
    return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)


_OWN = {
    "torchvision.deform_conv2d": _deform_conv,
    "torchvision._deform_conv2d_backward": _deform_conv_backward,
    "torchvision.roi_align": _roi_align,
    "torchvision._roi_align_backward": _roi_align_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
