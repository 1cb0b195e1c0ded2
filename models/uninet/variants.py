"""UniNet's published sizes and our small ones, as data.

B0-B6: channels, depths and expansions of the UniNet paper. G: those of the AGVM paper's appendix (1.08 billion
parameters). `tiny` is ours: G's arrangement at a size that trains on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

STRIDES = (2, 4, 8, 16, 16, 32)  # of the six stages' outputs; the stem has stride 2
CONV_STAGES = 4  # the others are transformer stages
STEM_CHANNELS = 32
HEAD_SIZE = 32  # channels of one attention head


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The sizes of one UniNet. `attention` is a pattern that is repeated over all transformer blocks.

    `windows` holds the side of a "window" block, in pixels of its map, in the first and the second transformer stage.
    """

    channels: tuple[int, ...]
    depths: tuple[int, ...]
    expansions: tuple[int, ...] = (1, 4, 6, 3, 2, 5)
    fused: bool = False  # Fused MBConv instead of UniNet's own convolution block
    image_size: int = 224
    attention: tuple[str, ...] = ("global",)
    windows: tuple[int, int] = (28, 14)

    def __post_init__(self) -> None:
        for name in ("channels", "depths", "expansions"):
            if len(getattr(self, name)) != len(STRIDES):
                raise ValueError(f"a UniNet has {len(STRIDES)} stages, got {name} {getattr(self, name)}")
        if any(c % HEAD_SIZE for c in self.channels[CONV_STAGES:]):
            raise ValueError(
                f"transformer stages need channels divisible by {HEAD_SIZE}, got {self.channels[CONV_STAGES:]}"
            )
        if not self.attention or set(self.attention) - {"window", "global"}:
            raise ValueError(f'attention is a pattern of "window" and "global", got {self.attention}')
        if min(self.windows) < 1:
            raise ValueError(f"windows must be at least one pixel wide, got {self.windows}")


_B = (24, 48, 80, 128, 128, 256)
# The AGVM paper: subsets of three transformer blocks, the last of each with global attention.
_SUBSETS = ("window", "window", "global")

VARIANTS = {
    "b0": Variant(channels=_B, depths=(1, 2, 4, 4, 4, 8), image_size=160),
    "b1": Variant(channels=_B, depths=(1, 2, 4, 4, 4, 8), image_size=224),
    "b2": Variant(channels=_B, depths=(2, 3, 6, 6, 6, 12), image_size=256),
    "b3": Variant(channels=(24, 56, 96, 160, 160, 288), depths=(2, 3, 7, 7, 7, 14), image_size=288),
    "b4": Variant(channels=(32, 64, 112, 192, 192, 352), depths=(2, 4, 9, 9, 9, 18), image_size=320),
    "b5": Variant(channels=(32, 64, 112, 224, 224, 448), depths=(3, 5, 10, 10, 10, 20), image_size=384),
    "b6": Variant(channels=(48, 96, 160, 256, 256, 512), depths=(4, 6, 12, 12, 12, 24), image_size=448),
    "g": Variant(
        channels=(104, 216, 384, 576, 576, 1152), depths=(6, 9, 18, 18, 18, 36), fused=True, attention=_SUBSETS
    ),
    "tiny": Variant(
        channels=(16, 24, 40, 64, 64, 96),
        depths=(1, 1, 2, 2, 3, 3),
        expansions=(1, 3, 3, 3, 2, 3),
        fused=True,
        image_size=64,
        attention=_SUBSETS,
        windows=(6, 3),
    ),
}


def variant(arch: str | Mapping[str, Any]) -> Variant:
    """A variant by name or by its fields. {"base": "b1", "attention": ["window", "global"]} changes a known one."""
    if isinstance(arch, str):
        if arch.lower() not in VARIANTS:
            raise ValueError(f'UniNet has no arch "{arch}": choose one of {", ".join(VARIANTS)}')
        return VARIANTS[arch.lower()]
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in arch.items()
    }
    known = [field.name for field in fields(Variant)]
    base = options.pop("base", None)
    if set(options) - set(known):
        raise ValueError(
            f"UniNet's arch has no field {sorted(set(options) - set(known))[0]!r}: it has {', '.join(known)}"
        )
    if base is not None:
        options = {**{name: getattr(variant(base), name) for name in known}, **options}
    missing = [name for name in ("channels", "depths") if name not in options]
    if missing:
        raise ValueError(f"UniNet's arch needs {missing[0]!r}, or a known one under 'base'")
    return Variant(**options)
