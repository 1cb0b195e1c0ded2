"""UniNet as a timm classifier: timm.create_model("uninet_b1"). Its tensors have the backbone's names, so that a
pre-trained classifier loads into a detector."""

from __future__ import annotations

import sys
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from models.uninet.backbone import UniNet
from models.uninet.variants import STRIDES, VARIANTS, Variant

HEAD_WIDTH = 1280


class UniNetClassifier(UniNet):
    """The six stages, a 1x1 convolution to 1280 channels, pooling and a linear layer."""

    def __init__(
        self, arch: Any = "b1", num_classes: int = 1000, in_chans: int = 3, drop_rate: float = 0.0, **options: Any
    ) -> None:
        super().__init__(arch, in_chans, out_indices=(len(STRIDES) - 1,), **options)
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, self.channels[-1], HEAD_WIDTH
        self.grad_checkpointing = self.with_cp
        self.head_conv = nn.Conv2d(self.num_features, HEAD_WIDTH, 1, bias=False)
        self.head_norm = nn.BatchNorm2d(HEAD_WIDTH)
        self.head_act = nn.GELU()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(HEAD_WIDTH, num_classes) if num_classes else nn.Identity()
        self.default_cfg = self.pretrained_cfg = {**_config(self.variant), "num_classes": num_classes}
        self.reset_parameters()

    def forward_features(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_act(self.head_norm(self.head_conv(x))).mean((2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(HEAD_WIDTH, num_classes) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.with_cp = self.grad_checkpointing = enable


def _config(shape: Variant) -> dict[str, Any]:
    """How timm's data pipeline prepares images for it."""
    return dict(
        url="",
        num_classes=1000,
        input_size=(3, shape.image_size, shape.image_size),
        pool_size=None,
        crop_pct=0.95,
        interpolation="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        first_conv="stem.0",
        classifier="head",
    )


default_cfgs = generate_default_cfgs({f"uninet_{arch}": _config(shape) for arch, shape in VARIANTS.items()})

# create_model hands these to every model; there are no published weights they could point to.
_PRETRAINED = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "pretrained_strict")


def _register(arch: str) -> None:
    def create(pretrained: bool = False, **options: Any) -> UniNetClassifier:
        if pretrained:
            raise ValueError(f"no weights of uninet_{arch} are published: load a file of your own after create_model")
        if options.pop("features_only", False):
            raise ValueError("for feature maps use the mmdet backbone UniNet, with out_indices")
        return UniNetClassifier(arch, **{k: v for k, v in options.items() if k not in _PRETRAINED})

    create.__name__ = create.__qualname__ = f"uninet_{arch}"
    create.__doc__ = f"UniNet-{arch.upper()} as a classifier."
    setattr(sys.modules[__name__], create.__name__, register_model(create))


for _arch in VARIANTS:
    _register(_arch)
