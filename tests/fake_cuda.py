"""CUDA tensors without a GPU: their values are on the CPU, and torch takes them for CUDA's.

torch's FakeTensorMode keeps torch from looking for a driver, but its tensors have no values, and detectors branch on
values. Here every operator really runs, on the CPU. Tensors on different devices raise, as they would on a GPU. Forward
passes only: autograd has no thread for a device that is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_MAY_MIX = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class FakeCuda(torch.Tensor):
    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> FakeCuda:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=CUDA,
            requires_grad=False,
        )
        tensor.values = values
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    def tolist(self) -> Any:  # torch refuses it for subclasses
        return self.values.tolist()

    def __repr__(self) -> str:
        return f"FakeCuda({self.values})"


class FakeDevice(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    here = [t for t in tensors if isinstance(t, FakeCuda)]
    elsewhere = [t for t in tensors if not isinstance(t, FakeCuda) and t.dim() > 0]
    name = function.overloadpacket.__name__
    if here and elsewhere and name not in _MAY_MIX:
        raise RuntimeError(
            f"{function} mixes devices: {[tuple(t.shape) for t in here]} on CUDA, "
            f"{[tuple(t.shape) for t in elsewhere]} on the CPU"
        )
    if name.startswith("index") and elsewhere and not isinstance(args[0], FakeCuda):
        assert not here, f"{function}: a CPU tensor is indexed with CUDA tensors"
    device = kwargs.get("device")
    to_cuda = bool(here) if device is None else torch.device(device).type == "cuda"
    if name == "copy_":
        to_cuda = isinstance(args[0], FakeCuda)
    known = {id(t.values): t for t in here}
    inside = {**kwargs, "device": CPU} if device is not None else kwargs
    args, inside = tree_map(lambda t: t.values if isinstance(t, FakeCuda) else t, (args, inside))
    with _disable_current_modes():
        result = function(*args, **inside)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:  # an operator in place
            return known[id(value)]
        if not to_cuda:
            return value
        # A copy between devices that torch would not make on one device.
        return FakeCuda(value.clone() if any(value is t for t in tree_leaves(args)) else value)

    return tree_map(wrapped, result)


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), torch.backends.cudnn.flags(enabled=False), FakeDevice():
        yield


def to_fake_cuda(model: nn.Module) -> nn.Module:
    made: dict[int, nn.Parameter] = {}  # a shared parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = made.get(id(parameter)) or nn.Parameter(FakeCuda(parameter.data), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = FakeCuda(buffer)
    return model
