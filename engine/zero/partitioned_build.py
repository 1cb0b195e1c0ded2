"""Build and initialise a model that is partitioned from the start (`deepspeed.zero.Init`).

zero.Init partitions a parameter as soon as its layer is constructed. What initialises it later (an outer constructor,
mmdet's `init_weights`) would write into an empty tensor, without an error. Here such a write gathers the parameter,
writes on rank 0 and partitions it again. On CPUs, what `init_weights` sets equals an unpartitioned build with the same
seed, and what a constructor draws has the same distribution; on GPUs the device draws both. Writes through `.data`
(mmcv's deformable convolutions, the biases of some heads) are not noticed and are lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.zero.scalars import scalars_partitioned


@contextlib.contextmanager
def partitioned(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """Build under zero.Init, but mmdet's helpers (anchors, coders, samplers) without it.

    zero.Init (DeepSpeed 0.19.8) gives every new tensor the model's dtype, so that even anchors are bf16, and breaks
    `torch.Tensor(array)`. Helpers have no parameters, so they are built with torch's own functions.
    """
    import deepspeed
    from mmdet.registry import TASK_UTILS  # mmdet must be set up before

    plain = _constructors()
    with scalars_partitioned(), deepspeed.zero.Init(config_dict_or_path=deepspeed_config):
        changed = {key: value for key, value in _constructors().items() if plain[key] is not value}
        build = TASK_UTILS.build

        def build_plainly(*args: Any, **kwargs: Any) -> Any:
            _restore({key: plain[key] for key in changed})
            try:
                return build(*args, **kwargs)
            finally:
                _restore(changed)

        TASK_UTILS.build = build_plainly
        try:
            with _writes_reach_parameters():
                yield
        finally:
            del TASK_UTILS.build  # back to the method of the class


def _constructors() -> dict[tuple[Any, str], Any]:
    functions = {(torch, name): value for name, value in vars(torch).items() if callable(value)}
    return {**functions, (torch.Tensor, "__new__"): torch.Tensor.__new__}


def _restore(functions: dict[tuple[Any, str], Any]) -> None:
    for (owner, name), value in functions.items():
        setattr(owner, name, value)


def is_partitioned(model: nn.Module) -> bool:
    return any(hasattr(p, "ds_id") for p in model.parameters())


def initialise(model: nn.Module) -> None:
    """`model.init_weights()`, partitioned or not, without mmengine's log lines on every tensor."""
    logging.disable(logging.WARNING)
    try:
        _initialise(model)
    finally:
        logging.disable(logging.NOTSET)


def _initialise(model: Any) -> None:
    with _writes_reach_parameters() if is_partitioned(model) else contextlib.nullcontext():
        _initialise_conv_modules(model)
        model.init_weights()


def _initialise_conv_modules(model: nn.Module) -> None:
    """mmcv's ConvModule initialises itself in its constructor, where zero.Init draws other numbers. Do it again, so
    that modules which no `init_weights` reaches get the same values, partitioned or not."""
    from mmcv.cnn import ConvModule  # our kernels must be in place before

    with torch.random.fork_rng(devices=[]):
        for module in model.modules():
            if isinstance(module, ConvModule):
                module.init_weights()


@contextlib.contextmanager
def _writes_reach_parameters() -> Iterator[None]:
    named = {
        name: getattr(nn.init, name)
        for name in dir(nn.init)
        if name.endswith("_") and not name.startswith("_") and callable(getattr(nn.init, name))
    }
    try:
        for name, function in named.items():
            setattr(nn.init, name, _on_gathered(function))
        with _GatheredWrites():
            yield
    finally:
        for name, function in named.items():
            setattr(nn.init, name, function)


def _not_gathered(value: Any) -> bool:
    status = getattr(value, "ds_status", None)
    return isinstance(value, nn.Parameter) and status is not None and status.name == "NOT_AVAILABLE"


def _on_gathered(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _not_gathered(tensor):
            return function(tensor, *args, **kwargs)
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            return function(tensor, *args, **kwargs)

    return call


class _GatheredWrites(TorchFunctionMode):
    """Catches in-place writes that do not go through torch.nn.init, such as `layer.bias.zero_()`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if args and writes and _not_gathered(args[0]):
            return _on_gathered(function)(*args, **kwargs)
        return function(*args, **kwargs)
