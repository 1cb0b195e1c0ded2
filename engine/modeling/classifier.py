"""A timm model with the interface of an mmdet detector (`loss`, `predict`), and with Mixup and CutMix.

The timm model is called `backbone`, so that a checkpoint's names fit a detector with the same backbone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from engine.config.schema import ClassificationConfig, DetectorConfig
from engine.data.classification import LabelledSample
from engine.data.types import Classes
from engine.errors import ConfigError, first_line, nearest
from engine.modeling.detector import freeze
from engine.zero.partitioned_build import is_partitioned
from models.mmdet_setup import import_mmdet, quiet

import_mmdet()
from mmengine.model import BaseDataPreprocessor  # noqa: E402

TOP = 5
# Arguments of create_model that are not options, and what sets them instead.
_NOT_OPTIONS = {
    "num_classes": "the data",
    "pretrained": "detector.load_from",
    "checkpoint_path": "detector.load_from",
    "pretrained_cfg": "detector.load_from",
    "pretrained_cfg_overlay": "detector.load_from",
    "cache_dir": "detector.load_from",
    "features_only": "the task",
    "in_chans": "the images, which have three channels",
}


@dataclass(frozen=True, kw_only=True)
class ImagePrediction:
    """The most probable classes of one image, best first, and the loss if its class is known."""

    img_id: int
    label: int | None
    labels: torch.Tensor
    scores: torch.Tensor
    loss: float | None


class StackImages(BaseDataPreprocessor):
    """Stacks images of one size into a tensor on the device. The loader has already normalised them."""

    def forward(self, data: dict[str, Any], training: bool = False) -> dict[str, Any]:
        data = self.cast_data(data)
        return {"inputs": torch.stack(data["inputs"]), "data_samples": data["data_samples"]}


class Classifier(nn.Module):
    """A timm model with its training targets."""

    def __init__(self, backbone: nn.Module, num_classes: int, settings: ClassificationConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.data_preprocessor = StackImages()
        self.mix: Callable | None = None
        if settings.mixup or settings.cutmix:
            self.mix = Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                num_classes=num_classes,
                label_smoothing=settings.label_smoothing,
            )
        self.criterion = SoftTargetCrossEntropy() if self.mix else LabelSmoothingCrossEntropy(settings.label_smoothing)

    def init_weights(self) -> None:
        """timm's constructors have initialised the model with the options' values. Do it again if zero.Init has
        partitioned the weights, or if `init_weights` takes no options, so that both builds start with equal weights."""
        again = getattr(self.backbone, "init_weights", None)
        if again is not None and (is_partitioned(self) or not inspect.signature(again).parameters):
            again()

    def loss(self, images: torch.Tensor, samples: Sequence[LabelledSample]) -> dict[str, torch.Tensor]:
        targets = torch.tensor([sample.label for sample in samples], device=images.device)
        if self.mix is not None:
            mixed, targets = self.mixed(images.float(), targets)
            images = mixed.to(images.dtype)
        return {"loss": self.criterion(self.backbone(images).float(), targets)}

    def mixed(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixup or CutMix of the micro-batch, with numpy's generator, which the loop seeds for each micro-batch.

        timm mixes the first image with the last, the second with the last but one, and needs an even number. In an odd
        micro-batch the second image is repeated as the first one's partner, so that no image is left unmixed.
        """
        assert self.mix is not None
        count = len(images)
        if count % 2:
            even = [*range(count), min(1, count - 1)]
            images, labels = images[even], labels[even]
        images, targets = self.mix(images, labels)
        return images[:count], targets[:count]

    def parse_losses(self, losses: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return losses["loss"], losses

    def predict(self, images: torch.Tensor, samples: Sequence[LabelledSample]) -> list[ImagePrediction]:
        logs = self.backbone(images).float().log_softmax(-1)
        scores, labels = logs.topk(min(TOP, logs.shape[-1]))
        return [
            ImagePrediction(
                img_id=sample.img_id,
                label=sample.label,
                labels=labels[row],
                scores=scores[row].exp(),
                loss=None if sample.label is None else -float(logs[row, sample.label]),
            )
            for row, sample in enumerate(samples)
        ]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.backbone(images)


def timm_name(config: str) -> str:
    """The name after `timm::`; ConfigError if timm does not know it."""
    name = config.removeprefix("timm::")
    if not timm.is_model(name):
        raise ConfigError(f'timm has no model "{name}"{nearest(name, timm.list_models())}')
    return name


def build_classifier(config: DetectorConfig, classes: Classes, settings: ClassificationConfig) -> Classifier:
    """The classifier on the CPU, or where `deepspeed.zero.Init` puts it."""
    name = timm_name(config.config)
    for option, place in _NOT_OPTIONS.items():
        if option in config.options:
            raise ConfigError(f"detector.options: {option} is settled by {place}: remove it")
    try:
        with quiet():
            backbone = timm.create_model(name, pretrained=False, num_classes=len(classes.things), **config.options)
    except Exception as error:  # timm raises errors of many types; its message is what helps
        raise ConfigError(
            f'classifier "{config.config}" cannot be built with these options ({first_line(error)})'
        ) from error
    if config.zero_init and not hasattr(backbone, "init_weights"):
        raise ConfigError(
            f'detector.zero_init: timm\'s "{name}" can be initialised in one piece only (it has no '
            "init_weights): set detector.zero_init to false"
        )
    _check_size(backbone, config.config, settings.image_size)
    model = Classifier(backbone, len(classes.things), settings)
    for prefix in config.frozen:
        freeze(model, prefix)
    return model


def _check_size(backbone: nn.Module, name: str, size: int) -> None:
    """Some transformers are built for one image size and would fail on any other in the first step."""
    patches = getattr(backbone, "patch_embed", None)
    own = getattr(patches, "img_size", None)
    if own is not None and getattr(patches, "strict_img_size", False) and tuple(own) != (size, size):
        raise ConfigError(
            f'classifier "{name}" is built for images of {own[0]}x{own[1]} pixels but '
            f'data.classification.image_size is {size}: set detector.options {{"img_size": {size}}}'
        )
