"""The feature pyramid of HTC-X, RCNet and SEPC, as an mmdet neck: `dict(type="HTCXPyramid")`."""

from __future__ import annotations

from collections.abc import Sequence

from mmdet.registry import MODELS
from mmengine.model import BaseModule
from torch import Tensor, nn

from models.batch_norm import keep_statistics
from models.htcx.cross_scale_shift import CrossScaleShift
from models.htcx.deformable import DeformableBlock, DeformableConv
from models.htcx.revfp import Fusion, RevFP
from models.htcx.sepc import SEPC


@MODELS.register_module()
class HTCXPyramid(BaseModule):
    """Maps of strides 8, 16, 32 (`in_channels`) to `num_outs` maps of `out_channels`, each half the size of the last.

    The paper names RCNet, SEPC, P3 to P8 and 384 channels. The order is inferred: 1x1 laterals with BN, RevFP, CSN,
    extra levels P6, P7, ... by deformable convolutions of stride 2 with BN (a ReLU before all but the first), then
    `sepc_depth` pyramid convolutions over all levels. `extra_levels_first` makes the extra levels from the laterals, so
    that RevFP and CSN see all levels, as in the original RCNet. Half sizes are rounded up.

    `revfp=False`, `shift=False` and `sepc_depth=0` switch parts off. With `norm_eval`, all BN use their running
    statistics in training and do not update them, while their weights train.
    """

    def __init__(
        self,
        in_channels: Sequence[int] = (384, 576, 1152),
        out_channels: int = 384,
        num_outs: int = 6,
        *,
        revfp: bool = True,
        shift: bool = True,
        sepc_depth: int = 4,
        extra_levels_first: bool = False,
        revfp_offset_groups: int = 2,
        offset_groups: int = 1,
        sepc_align_corners: bool = True,
        norm_eval: bool = False,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        if num_outs < len(in_channels):
            raise ValueError(f"num_outs must be at least {len(in_channels)}, one for each input, got {num_outs}")
        self.norm_eval = norm_eval
        self.extra_levels_first = extra_levels_first
        self.laterals = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels))
            for width in in_channels
        )
        fused = num_outs if extra_levels_first else len(in_channels)
        self.revfp = RevFP(out_channels, fused, offset_groups=revfp_offset_groups) if revfp else None
        self.shift = CrossScaleShift(out_channels, fused, meeting_level=len(in_channels) // 2) if shift else None
        self.extra = nn.ModuleList(
            DeformableBlock(out_channels, stride=2, offset_groups=offset_groups, relu=i > 0)
            for i in range(num_outs - len(in_channels))
        )
        self.sepc = SEPC(out_channels, sepc_depth, offset_groups=offset_groups, align_corners=sepc_align_corners)

    def init_weights(self) -> None:
        """Normal weights scaled by fan-in, gain 1, as BN or a sum follows each. Offsets and attention start neutral."""
        for module in self.modules():
            if isinstance(module, nn.modules.conv._ConvNd):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="linear")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, (DeformableConv, Fusion)):
                module.start_neutral()
        super().init_weights()  # the user's init_cfg comes last

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(inputs) != len(self.laterals):
            raise ValueError(f"the pyramid takes {len(self.laterals)} maps, got {len(inputs)}")
        maps = [lateral(x) for lateral, x in zip(self.laterals, inputs)]
        if self.extra_levels_first:
            maps = self._extended(maps)
        if self.revfp is not None:
            maps = self.revfp(maps)
        if self.shift is not None:
            maps = self.shift(maps)
        if not self.extra_levels_first:
            maps = self._extended(maps)
        return tuple(self.sepc(maps))

    def _extended(self, maps: list[Tensor]) -> list[Tensor]:
        maps = list(maps)
        for block in self.extra:
            maps.append(block(maps[-1]))
        return maps

    def train(self, mode: bool = True) -> HTCXPyramid:
        super().train(mode)
        if mode and self.norm_eval:
            keep_statistics(self)
        return self
