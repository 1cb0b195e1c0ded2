"""How the accelerator computes the model: TF32, the order of a map in memory, and a compiled backbone.

None of them changes what is computed, only how it is rounded and how fast it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.errors import ConfigError
from models.batch_norm import Fp32BatchNorm


def use_tf32(enabled: bool, device: torch.device) -> str | None:
    """Let CUDA round the factors of fp32 products and convolutions to TF32, or forbid it; what was done, for the log.

    On CPU ranks nothing is changed: torch's switch would reach oneDNN's products too. torch 2.15 has newer switches for
    single backends, but torch.compile still reads these, and raises where both kinds were used.
    """
    if device.type != "cuda":
        return None
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled
    return f"products and convolutions of fp32 are computed in {'TF32' if enabled else 'fp32'} (detector.tf32)"


def use_channels_last(model: Any) -> None:
    """Hand the images to the backbone with channels last: convolutions and norms keep that order for all maps.

    Weights are left alone. ZeRO keeps them as ranges of flat tensors, where only the usual order is possible, and cuDNN
    chooses its kernels by the map: weights, which are small, are reordered in each call.
    """
    _backbone(model, "channels_last").register_forward_pre_hook(_images_last)


def _images_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last)
        if isinstance(value, torch.Tensor) and value.dim() == 4
        else value
        for value in args
    )


def compile_backbone(model: Any, *, stage: int, recomputed: bool) -> None:
    """torch.compile of the backbone. Names of parameters stay as they are."""
    backbone = _backbone(model, "compile_backbone")
    if stage == 3:
        raise ConfigError(
            "detector.compile_backbone does not work at ZeRO-3, where hooks inside the backbone gather weights: use "
            "stage 0, 1 or 2, or leave it out"
        )
    if recomputed:
        raise ConfigError(
            "detector.compile_backbone and detector.checkpoint_activations cannot be used together: leave one of them "
            "out"
        )
    if any(isinstance(module, Fp32BatchNorm) and module.synchronise for module in backbone.modules()):
        raise ConfigError(
            "detector.compile_backbone is not for a backbone whose batch norms send messages in the middle of it: set "
            "detector.sync_bn to false, or leave detector.compile_backbone out"
        )
    backbone.compile()


def _backbone(model: Any, key: str) -> nn.Module:
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise ConfigError(f"detector.{key} needs a detector with a backbone, which this one has not: leave it out")
    return backbone
