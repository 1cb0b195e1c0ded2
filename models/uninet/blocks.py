"""The blocks of UniNet. Maps are (N, C, H, W), best stored channels-last: then the tokens are a view of the map."""

from __future__ import annotations

from typing import Any

from timm.layers import DropPath, LayerScale, Mlp
from timm.layers.attention import Attention
from timm.models._efficientnet_blocks import ConvBnAct, EdgeResidual, SqueezeExcite
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from models.uninet.variants import HEAD_SIZE


class ConvBlock(nn.Module):
    """UniNet's own block: BN, [1x1, BN, GELU,] depth-wise 3x3, BN, GELU, SE, 1x1, BN, around a skip connection.

    Without expansion there is no first 1x1. If the number of channels changes, the skip has a 1x1. Read this way, B1 to
    B6 have the published parameter counts.
    """

    def __init__(self, in_channels: int, channels: int, expansion: int, drop_path: float = 0.0) -> None:
        super().__init__()
        hidden = in_channels * expansion
        expand = [nn.Conv2d(in_channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.GELU()]
        self.norm = nn.BatchNorm2d(in_channels)
        self.expand = nn.Sequential(*expand if expansion > 1 else [])
        self.depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(hidden)
        self.act = nn.GELU()
        self.se = SqueezeExcite(hidden, rd_channels=hidden // 4, act_layer=nn.GELU, gate_layer=nn.Hardsigmoid)
        self.project = nn.Conv2d(hidden, channels, 1)
        self.last_norm = nn.BatchNorm2d(channels)
        self.skip = nn.Conv2d(in_channels, channels, 1) if in_channels != channels else nn.Identity()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.depthwise_norm(self.depthwise(self.expand(self.norm(x)))))
        return self.skip(x) + self.drop_path(self.last_norm(self.project(self.se(y))))


def fused_block(in_channels: int, channels: int, expansion: int, drop_path: float = 0.0) -> nn.Module:
    """Fused MBConv (EfficientNetV2), from timm. GELU and the zero-initialised last norm are our inference."""
    options = dict(act_layer=nn.GELU, drop_path_rate=drop_path)
    if expansion == 1:
        return ConvBnAct(in_channels, channels, 3, skip=True, **options)
    return EdgeResidual(in_channels, channels, exp_ratio=expansion, **options)


def last_norm(block: Any) -> nn.BatchNorm2d | None:
    """The norm at the end of a convolution block's branch. It starts at zero, so that the block starts as its skip.

    None for a Fused MBConv that changes the channels (the first of stage 0): it has no skip and would output zeros.
    """
    if isinstance(block, ConvBlock):
        return block.last_norm
    return (block.bn2 if isinstance(block, EdgeResidual) else block.bn1) if block.has_skip else None


class TransformerBlock(nn.Module):
    """x += depth-wise 3x3 (position); x += gamma1 MHSA(LN x); x += gamma2 MLP(LN x).

    There is no table of positions, so maps may have any size. `window` is the side of the windows, None for global
    attention. Zeros at the right and at the bottom pad a map to whole windows, without shift (inferred). A side of the
    map that is shorter than the window is one window without padding: a window that covers the map is global attention.
    """

    def __init__(
        self, channels: int, expansion: int, *, window: int | None, drop_path: float = 0.0, layer_scale: float = 1e-6
    ) -> None:
        super().__init__()
        self.window = window
        self.position = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = Attention(channels, num_heads=channels // HEAD_SIZE, qkv_bias=True)
        self.attention_scale = LayerScale(channels, layer_scale)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = Mlp(channels, channels * expansion)
        self.mlp_scale = LayerScale(channels, layer_scale)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.position(x)).permute(0, 2, 3, 1)
        x = x + self.drop_path(self.attention_scale(self.attend(self.attention_norm(x))))
        x = x + self.drop_path(self.mlp_scale(self.mlp(self.mlp_norm(x))))
        return x.permute(0, 3, 1, 2)

    def attend(self, x: Tensor) -> Tensor:
        """x is (N, H, W, C)."""
        height, width = x.shape[1:3]
        side = None if self.window is None else (min(self.window, height), min(self.window, width))
        if side is None or side == (height, width):
            return self.attention(x.flatten(1, 2)).unflatten(1, (height, width))
        rows, columns = -(-height // side[0]), -(-width // side[1])
        x = pad(x, (0, 0, 0, columns * side[1] - width, 0, rows * side[0] - height))
        x = x.unflatten(2, (columns, side[1])).unflatten(1, (rows, side[0])).transpose(2, 3)
        x = self.attention(x.flatten(3, 4).flatten(0, 2)).view(x.shape)  # N, rows, columns, side, side, C
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :height, :width]


class _Branches(nn.Module):
    """Shared by both down-sampling modules: a depth-wise branch, and a shortcut of max-pool and 1x1."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(in_channels, in_channels, 3, stride=stride, padding=1, groups=in_channels)
        self.depthwise_norm = nn.BatchNorm2d(in_channels)
        self.project = nn.Conv2d(in_channels, channels, 1)
        self.pool = nn.MaxPool2d(3, stride=stride, padding=1) if stride > 1 else nn.Identity()
        self.shortcut = nn.Conv2d(in_channels, channels, 1)

    def local(self, x: Tensor) -> Tensor:
        return self.project(self.depthwise_norm(self.depthwise(x)))


class LocalDownsample(_Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.local(x) + self.shortcut(self.pool(x))


class LocalGlobalDownsample(_Branches):
    """Every pixel of the smaller map attends to all pixels of the larger one. The depth-wise branch has the queries."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__(in_channels, channels, stride)
        self.query_norm = nn.LayerNorm(channels)
        self.norm = nn.LayerNorm(in_channels)
        self.key_value = nn.Linear(in_channels, 2 * channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query_norm(self.local(x).permute(0, 2, 3, 1))
        height, width = q.shape[1:3]
        k, v = self.key_value(self.norm(x.permute(0, 2, 3, 1).flatten(1, 2))).chunk(2, dim=-1)
        heads = [t.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for t in (q.flatten(1, 2), k, v)]
        attended = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        attended = self.output(attended).unflatten(1, (height, width)).permute(0, 3, 1, 2)
        return attended + self.shortcut(self.pool(x))
