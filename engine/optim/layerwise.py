"""The base class of LARS and LAMB: rules whose step depends on norms over a whole layer.

A layer is one parameter. Under ZeRO its pieces lie on several ranks, a flat shard holds pieces of many layers, and
DeepSpeed steps shard by shard. So `engine.zero` computes the norms before the first shard steps, and the step applies
the ratio of each layer to its pieces. Without DeepSpeed the parameters are not partitioned: norms are computed here.
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
    """A rule implements `update`, `layer_terms` (whose sums its ratio needs) and `ratio`.

    With `adapt_1d` False the ratio of normalisation layers and biases is 1, as is usual. It is also 1 if the norm of
    the layer, or of its step, is zero.
    """

    # Whether the sums need the gradient as the step will see it (unscaled and clipped). If not, they use DeepSpeed's
    # gradient as it is, the last sum is |g|^2, and `ratio` applies the scale: clipping needs no second all-reduce.
    needs_final_gradient = True

    _norms: Any = None  # engine.zero's LayerNorms, once attached

    def __init__(self, params: Any, defaults: dict[str, Any], **further: Any) -> None:
        if not isinstance(defaults["adapt_1d"], bool):
            raise ValueError(f"adapt_1d must be true or false, got {defaults['adapt_1d']!r}")
        super().__init__(params, defaults, **further)
        self._whole = {id(p) for group in self.param_groups for p in group["params"]}
        self.layers: list[Layer] = []
        self.segments: dict[Tensor, list[Segment]] = {}
        self.ratios: list[float] = []

    def layer_terms(self, group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> list[Tensor]:
        """`sums_per_layer` vectors, to be summed over each layer, for a slice of one or more layers.

        Called before the step; w and g are fp32. `state` holds the same slice of the optimizer's state (numbers
        unchanged); it is empty before the first step.
        """
        raise NotImplementedError

    def ratio(self, group: dict[str, Any], sums: Sequence[float], scale: float) -> float:
        """The factor on the step of a layer with these sums; the step will see `scale` times the gradient in them."""
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
        """Set the layers (param group, dimensions) and, for each shard, its segments (start, stop, layer)."""
        self.layers = [Layer(*layer) for layer in layers]
        self.segments = {shard: [Segment(*segment) for segment in own] for shard, own in segments.items()}

    def take_sums(self, sums: Sequence[Sequence[float]], scale: float) -> None:
        """Compute the ratios of this optimizer step from the sums of all layers over all ranks."""
        groups = [self.param_groups[layer.group] for layer in self.layers]
        self.ratios = [
            self.ratio(group, row, scale) if group["adapt_1d"] or layer.dimensions > 1 else 1.0
            for layer, group, row in zip(self.layers, groups, sums)
        ]

    def begin(self) -> bool:
        return self._norms is not None or self._measure_whole_parameters()

    def _measure_whole_parameters(self) -> bool:
        """Compute the ratios without DeepSpeed; False if there is nothing to do."""
        owned = [(k, p) for k, group in enumerate(self.param_groups) for p in group["params"] if p.grad is not None]
        if any(id(p) not in self._whole for _, p in owned):
            if any(p.grad.any() for _, p in owned):
                raise RuntimeError(
                    f"{type(self).__name__} was handed shards without knowing whose they are: call "
                    "optimizer.attach(engine) right after deepspeed.initialize"
                )
            return False  # DeepSpeed 0.19.8 steps once at stage 0 in half precision while it builds, without gradients
        self.follow([(k, p.dim()) for k, p in owned], {p: [(0, p.numel(), i)] for i, (_, p) in enumerate(owned)})
        terms = [
            self.layer_terms(
                self.param_groups[k],
                flat_state(self.state.get(p, {})),
                p.reshape(-1).float(),
                p.grad.reshape(-1).float(),
            )
            for k, p in owned
        ]
        # sum() adds pairwise and stays exact to 1e-8 in fp32.
        self.take_sums([[float(term.sum()) for term in of_layer] for of_layer in terms], 1.0)
        return True

    def segments_of(self, shard: Tensor) -> list[Segment]:
        """Empty for a shard that is all padding: ZeRO partitions even a group of one element over all ranks."""
        return self.segments.get(shard, [])

    def by_layer(self, params: Sequence[Tensor], *aligned: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[float]]:
        """Cut lists of tensors aligned with `params` at the borders of layers; returns the pieces and their ratios."""
        cut: list[list[Tensor]] = [[] for _ in aligned]
        ratios = []
        for p, *tensors in zip(params, *aligned):
            for segment in self.segments_of(p):
                whole = segment.stop - segment.start == p.numel()  # may be channels_last: no view
                for column, tensor in zip(cut, tensors):
                    column.append(tensor if whole else tensor.view(-1)[segment.start : segment.stop])
                ratios.append(self.ratios[segment.layer])
        return cut, ratios


def flat_state(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.reshape(-1) if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()
    }
