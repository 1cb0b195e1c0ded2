"""UniNet as an mmdet backbone: `dict(type="UniNet")`. The network itself is in `models.uninet.network`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor

from models.uninet.network import UniNetStages
from models.uninet.variants import STRIDES


@MODELS.register_module()
class UniNet(UniNetStages, BaseModule):
    """The maps of the stages in `out_indices`. The other options are those of `UniNetStages`."""

    def __init__(
        self,
        arch: str | Mapping[str, Any] = "b1",
        in_channels: int = 3,
        out_indices: Sequence[int] = (2, 4, 5),
        init_cfg: Any = None,
        **options: Any,
    ) -> None:
        if not out_indices or not all(0 <= i < len(STRIDES) for i in out_indices):
            raise ValueError(f"UniNet's out_indices are stages 0 to {len(STRIDES) - 1}, got {tuple(out_indices)}")
        super().__init__(arch, in_channels, **options)
        self.init_cfg = copy.deepcopy(init_cfg)
        self.out_indices = tuple(out_indices)
        self.channels = [self.variant.channels[i] for i in out_indices]
        self.strides = [STRIDES[i] for i in out_indices]

    def init_weights(self) -> None:
        super().init_weights()
        BaseModule.init_weights(self)  # the user's init_cfg comes last

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.forward_stages(x, max(self.out_indices))
        return tuple(maps[i] for i in self.out_indices)
