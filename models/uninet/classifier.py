"""UniNet as a timm model: `timm.create_model("uninet_b1")`, with `features_only=True` for the maps of its stages.

Its tensors have the names of the mmdet backbone, so that a pre-trained classifier loads into a detector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from models.uninet.network import UniNetStages
from models.uninet.variants import STRIDES, VARIANTS

HEAD_WIDTH = 1280


class UniNetClassifier(UniNetStages):
    """The six stages, a 1x1 convolution to 1280 channels, pooling and a linear layer."""

    def __init__(
        self, arch: Any = "b1", num_classes: int = 1000, in_chans: int = 3, drop_rate: float = 0.0, **options: Any
    ) -> None:
        super().__init__(arch, in_chans, **options)
        channels = self.variant.channels
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, channels[-1], HEAD_WIDTH
        self.feature_info = [
            dict(num_chs=width, reduction=stride, module=f"stages.{i}")
            for i, (width, stride) in enumerate(zip(channels, STRIDES))
        ]
        self.grad_checkpointing = self.with_cp
        self.head_conv: nn.Module = nn.Conv2d(self.num_features, HEAD_WIDTH, 1, bias=False)
        self.head_norm: nn.Module = nn.BatchNorm2d(HEAD_WIDTH)
        self.head_act = nn.GELU()
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        self.init_weights()

    def forward_features(self, x: Tensor) -> Tensor:
        return self.forward_stages(x, len(self.stages) - 1)[-1]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_act(self.head_norm(self.head_conv(x))).mean((2, 3))
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of the stages in `indices`, as timm asks for them. `norm` has no effect: UniNet has no last norm."""
        if output_fmt != "NCHW":
            raise ValueError(f"UniNet's maps are NCHW, got output_fmt {output_fmt}")
        chosen, last = feature_take_indices(len(self.stages), indices)
        maps = self.forward_stages(x, last if stop_early else len(self.stages) - 1)
        found = [maps[i] for i in chosen]
        return found if intermediates_only else (maps[-1], found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """timm calls this for `features_only=True`: it removes the stages after the last in `indices`, and the head."""
        chosen, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.head_conv, self.head_norm = nn.Identity(), nn.Identity()
            self.reset_classifier(0)
        return chosen

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(HEAD_WIDTH, num_classes) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.with_cp = self.grad_checkpointing = enable


# How timm's data pipeline prepares images.
default_cfgs = generate_default_cfgs(
    {
        f"uninet_{arch}": dict(
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
        for arch, shape in VARIANTS.items()
    }
)


def _create(arch: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    name = f"uninet_{arch}"
    if pretrained:
        raise ValueError(f"no weights of {name} are published: load a file of your own after create_model")
    # "getter" calls forward_intermediates, so the tensors of a feature extractor keep their names (below "model.").
    features = dict(out_indices=(2, 4, 5), feature_cls="getter")
    return build_model_with_cfg(UniNetClassifier, name, False, feature_cfg=features, arch=arch, **kwargs)


@register_model
def uninet_b0(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b0", pretrained, **kwargs)


@register_model
def uninet_b1(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b1", pretrained, **kwargs)


@register_model
def uninet_b2(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b2", pretrained, **kwargs)


@register_model
def uninet_b3(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b3", pretrained, **kwargs)


@register_model
def uninet_b4(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b4", pretrained, **kwargs)


@register_model
def uninet_b5(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b5", pretrained, **kwargs)


@register_model
def uninet_b6(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("b6", pretrained, **kwargs)


@register_model
def uninet_g(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("g", pretrained, **kwargs)


@register_model
def uninet_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    return _create("tiny", pretrained, **kwargs)
