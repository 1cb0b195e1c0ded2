"""Build a model whose parameters take no memory until their values are known.

Only parameters go without storage, each as soon as its layer has it. Buffers and plain tensors (anchors, tables of
positions) are computed as in any build, so that what is in no state dict is right too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device when it is registered. It stays the same object, so ties stay tied."""
    register = nn.Module.register_parameter

    def registering(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            _exchange(param, param.detach().to("meta"))
        register(self, name, param)

    nn.Module.register_parameter = registering  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def give_storage(model: nn.Module, device: torch.device) -> None:
    """Give the parameters storage on the device, with values still to come, and move everything else there."""
    for parameter in model.parameters():
        if parameter.is_meta:
            _exchange(parameter, torch.empty_like(parameter, device=device))
    model.to(device)


def _exchange(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Replace what a parameter holds; `.data` cannot be set across devices."""
    other = nn.Parameter(data.detach(), parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)  # marks on it, such as `was_scalar`
    torch.utils.swap_tensors(parameter, other)
