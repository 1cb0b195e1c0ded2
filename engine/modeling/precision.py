"""bf16 and fp16: the type of the model, and what is still computed in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The type that DeepSpeed casts the model to; fp32 if it does not cast."""

    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, deepspeed_config: dict[str, Any]) -> Precision:
        if deepspeed_config.get("bf16", deepspeed_config.get("bfloat16", {})).get("enabled"):
            return cls(dtype=torch.bfloat16)
        if deepspeed_config.get("fp16", {}).get("enabled"):
            return cls(dtype=torch.float16)
        return cls()

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager:
        """Computes softmax, losses and norms in fp32 although the weights have half precision."""
        return torch.autocast(device.type, dtype=self.dtype) if self.half else contextlib.nullcontext()


def loss_in_fp32(model: nn.Module) -> None:
    """Under bf16 or fp16, let heads compute targets, losses and boxes in fp32, and crop regions with fp32 corners.

    bf16 rounds coordinates above 256, and sums over thousands of anchors overflow fp16. Without this, half precision
    fails on detectors. The networks themselves stay in half precision.
    """
    # Here, because importing mmdet takes seconds.
    from mmdet.models.roi_heads.roi_extractors.base_roi_extractor import BaseRoIExtractor

    names = ("loss_by_feat", "predict_by_feat", "loss_and_target", "_predict_by_feat_single")
    for module in model.modules():
        if isinstance(module, BaseRoIExtractor):  # mmdet casts regions to the type of the features
            module.forward = _Fp32Call(module.forward)
        collate = getattr(module, "collate_dn_queries", None)  # DINO's denoising queries
        if collate is not None:
            setattr(module, "collate_dn_queries", _Fp32Queries(collate))  # noqa: B010  (mypy takes it for a parameter)
        for name in names:
            method = getattr(module, name, None)
            if callable(method) and not isinstance(method, nn.Module):
                setattr(module, name, _Fp32Call(method))


class _Fp32Call:
    """Calls a bound method with fp32 tensors, outside autocast. A class, so that the module can still be copied."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next((t.device.type for t in _tensors((args, kwargs))), "cpu")
        with torch.autocast(device, enabled=False):
            return self.method(*_to_fp32(args), **_to_fp32(kwargs))


class _Fp32Queries(_Fp32Call):
    """mmdet writes queries into a new fp32 tensor, which takes no others. The label queries join those of the network,
    so they return to its type; boxes stay fp32."""

    def __call__(self, label_queries: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        labels, boxes = super().__call__(label_queries, *args, **kwargs)
        return labels.to(label_queries.dtype), boxes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({key: _to_fp32(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_to_fp32(item) for item in value])
    if isinstance(value, (list, tuple)):
        return type(value)(_to_fp32(item) for item in value)
    return value
