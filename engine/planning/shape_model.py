"""The model of a run as shapes: every parameter a fake tensor, as one rank of a world that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from engine.config import RunConfig
from engine.data.types import Classes
from engine.modeling.build import build_model
from engine.modeling.precision import Precision
from engine.tasks.registry import task_of

DEVICE = torch.device("cpu")  # of fake tensors: they have no memory, but operators ask where they are


class _NumbersStayReal(TorchFunctionMode):
    """Swin and others draw their stochastic depth from a linspace and read its values while they are built."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.linspace:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def build_shape_model(config: RunConfig, classes: Classes) -> tuple[nn.Module, FakeTensorMode]:
    """The model as `engine.train.build.build_model` makes it, cast to the run's type, and the mode its tensors belong to.

    Real tensors may be mixed in: what comes of pixels has shapes only, what comes of the ground truth has values.
    """
    detector = config.detector.model_copy(update={"load_from": None, "zero_init": False})
    with torch.device("meta"), _NumbersStayReal():
        model = build_model(task_of(config.model_copy(update={"detector": detector})), classes, empty=True)
    model.to(Precision.of(config.deepspeed).dtype)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, nn.Parameter] = {}  # a shared parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(
                        FakeTensor(mode, parameter.data, DEVICE), parameter.requires_grad
                    )
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = FakeTensor(mode, buffer, DEVICE)
    return model, mode
