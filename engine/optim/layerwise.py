"""The base of LARS and LAMB: rules whose step on a layer depends on norms over the whole of it.

A layer is one parameter. Under ZeRO its pieces lie on several ranks, many layers share one flat shard, and DeepSpeed
steps shard by shard: so the norms are gathered before the first of them, by `engine.zero`, and the step applies one ratio
per layer to whatever pieces of layers its shards hold. Without DeepSpeed the parameters are whole and it is done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from engine.optim.rule import Rule
from engine.zero.layer_norms import LayerNorms


class Layer(NamedTuple):
    group: int
    dimensions: int


class Segment(NamedTuple):
    """A range of a shard that belongs to one layer."""

    start: int
    stop: int
    layer: int


class LayerwiseOptimizer(Rule):
    """A rule gives `update`, the sums that its ratio is made of (`layer_sums`), and the ratio (`ratio`).

    With `adapt_1d` False the ratio of norms and biases is 1, as is customary. So it is for a layer whose norm, or whose
    step's, is zero.
    """

    # Whether the sums are of the gradient as the step will see it. Otherwise they are of DeepSpeed's, and the last of
    # them is |g|^2: the rule follows a factor on g by itself, and clipping then needs no second all-reduce.
    needs_final_gradient = True

    _norms: Any = None  # of engine.zero, once attached

    def __init__(self, params: Any, defaults: dict[str, Any], **further: Any) -> None:
        if not isinstance(defaults["adapt_1d"], bool):
            raise ValueError(f"adapt_1d must be true or false, got {defaults['adapt_1d']!r}")
        super().__init__(params, defaults, **further)
        self._whole = {id(p) for group in self.param_groups for p in group["params"]}
        self.layers: list[Layer] = []
        self.segments: dict[Tensor, list[Segment]] = {}
        self.ratios: list[float] = []

    def layer_sums(self, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> Tensor:
        """Sums over a slice of a layer, before the step; all in fp32. `state` holds the same slice of the optimizer's
        state, empty before the first step, and its numbers as they are."""
        raise NotImplementedError

    def ratio(self, group: dict[str, Any], sums: Sequence[float], scale: float) -> float:
        """The factor on the step of a layer with these sums; the step will see `scale` times their gradient."""
        raise NotImplementedError

    def attach(self, engine: Any, **further: Any) -> None:
        super().attach(engine, **further)
        LayerNorms(engine, self)

    def detach(self) -> None:
        if self._norms is not None:
            self._norms.detach()
        super().detach()

    def follow(
        self, layers: Sequence[tuple[int, int]], segments: Mapping[Tensor, Sequence[tuple[int, int, int]]]
    ) -> None:
        """Which layers there are (param group, dimensions), and whose the ranges of each shard are (start, stop)."""
        self.layers = [Layer(*layer) for layer in layers]
        self.segments = {shard: [Segment(*segment) for segment in own] for shard, own in segments.items()}

    def take_sums(self, sums: Sequence[Sequence[float]], scale: float) -> None:
        """The sums of all layers, over all ranks, of this optimizer step."""
        groups = [self.param_groups[layer.group] for layer in self.layers]
        self.ratios = [
            self.ratio(group, row, scale) if group["adapt_1d"] or layer.dimensions > 1 else 1.0
            for layer, group, row in zip(self.layers, groups, sums)
        ]

    def begin(self) -> bool:
        return self._norms is not None or self._measure_whole_parameters()

    def _measure_whole_parameters(self) -> bool:
        """Without DeepSpeed; False where there is nothing to do."""
        owned = [(k, p) for k, group in enumerate(self.param_groups) for p in group["params"] if p.grad is not None]
        if any(id(p) not in self._whole for _, p in owned):
            if any(p.grad.any() for _, p in owned):
                raise RuntimeError(
                    f"{type(self).__name__} was handed shards without knowing whose they are: call "
                    "optimizer.attach(engine) right after deepspeed.initialize"
                )
            return False  # DeepSpeed 0.19.8 steps once at stage 0 in half precision while it builds, without gradients
        self.follow([(k, p.dim()) for k, p in owned], {p: [(0, p.numel(), i)] for i, (_, p) in enumerate(owned)})
        sums = [
            self.layer_sums(
                self.param_groups[k],
                flat_state(self.state.get(p, {})),
                p.reshape(-1).float(),
                p.grad.reshape(-1).float(),
            ).tolist()
            for k, p in owned
        ]
        self.take_sums(sums, 1.0)
        return True

    def segments_of(self, shard: Tensor) -> list[Segment]:
        """None for a shard that is all padding: ZeRO cuts a group of one element for any number of ranks."""
        return self.segments.get(shard, [])

    def by_layer(self, params: Sequence[Tensor], *aligned: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[float]]:
        """Lists of tensors that lie like `params`, cut into their layers, and each piece's ratio."""
        cut: list[list[Tensor]] = [[] for _ in aligned]
        ratios = []
        for p, *tensors in zip(params, *aligned):
            for segment in self.segments_of(p):
                whole = segment.stop - segment.start == p.numel()  # in whatever memory format it has
                for column, tensor in zip(cut, tensors):
                    column.append(tensor if whole else tensor.view(-1)[segment.start : segment.stop])
                ratios.append(self.ratios[segment.layer])
        return cut, ratios


def flat_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.reshape(-1) if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()
    }


def product(a: Tensor, b: Tensor) -> Tensor:
    """sum(a b). sum() adds pairwise and stays exact to 1e-8 in fp32; dot() adds one after the other and is not."""
    return (a * b).sum().double()
