"""Sums over whole layers before every optimizer step, for the layer-wise rules (LARS, LAMB).

Under ZeRO the pieces of a layer lie on several ranks. Each rank adds up its own fragments, layer by layer; one
all-reduce of a few numbers per layer gives the sums over whole layers. A rule that needs the final gradient (LAMB) must
know DeepSpeed's clipping factor first: with clipping on, this takes a second all-reduce, of one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.geometry import Fragment
from engine.zero.layout import layout_of
from engine.zero.patching import Wrapped
from engine.zero.slices import Slices, gradient_norm, segment_sums, slice_limit, whole_fragments
from engine.zero.support import check_own_engine, refuse_unsupported


class LayerNorms:
    """Connects a DeepSpeed engine with a client optimizer (`LayerwiseOptimizer`).

    `client.follow` is told the layers, and which range of which shard belongs to which layer. Before each step,
    `client.layer_terms` turns slices of weights, gradient and state into `sums_per_layer` terms to add up, and
    `client.take_sums` gets the sums of all layers. `client.needs_final_gradient` says which gradient it needs.
    """

    def __init__(self, engine: Any, client: Any) -> None:
        name = type(client).__name__
        check_own_engine(engine, client, name=name, attached=client._norms is not None)
        refuse_unsupported(engine, name)
        self.engine, self.client, self.layout = engine, client, layout_of(engine)
        self._check_weights()
        device = next((shard.device for shard in self.layout.shards().values()), torch.device(engine.device))
        self.slices = Slices(self.layout, whole_fragments(self.layout), slice_limit(device))
        segments: dict[Tensor, list[tuple[int, int, int]]] = {shard: [] for shard in self.layout.shards().values()}
        for fragment in self.layout.held():
            stop = fragment.offset + fragment.stop - fragment.start
            segments[self.layout.shard(fragment)].append((fragment.offset, stop, fragment.param))
        client.follow(
            [(group, len(getattr(p, "ds_shape", p.shape))) for p, group in zip(self.layout.params, self.layout.group)],
            segments,
        )
        self.wrapped = Wrapped()
        self.wrapped.put(engine.optimizer, "step", self._step)
        client._norms = self

    def detach(self) -> None:
        self.wrapped.undo()
        self.client._norms = None

    def _check_weights(self) -> None:
        """RuntimeError if the shards hold the parameters elsewhere than the layout says (another DeepSpeed version)."""
        for fragment in self.layout.held():
            parameter = self.layout.params[fragment.param]
            if parameter.is_meta:  # in a dry run, without data
                continue
            if hasattr(parameter, "ds_tensor"):
                own = parameter.ds_tensor.reshape(-1)[: fragment.stop - fragment.start]
            else:
                own = parameter.detach().reshape(-1)[fragment.start : fragment.stop]
            if not torch.equal(self._weights(fragment).to(own), own):
                raise RuntimeError(
                    "DeepSpeed's shards do not hold the parameters where engine/zero/layout.py reads "
                    "them: use deepspeed 0.19.x"
                )

    def _weights(self, fragment: Fragment) -> Tensor:
        stop = fragment.offset + fragment.stop - fragment.start
        return self.layout.shard(fragment).detach().reshape(-1)[fragment.offset : stop]

    def _step(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        self._measure()
        return original(*args, **kwargs)

    @torch.no_grad()
    def _measure(self) -> None:
        layout, client = self.layout, self.client
        final, per_layer = client.needs_final_gradient, client.sums_per_layer
        layout.settle()
        scale = 1.0
        if final:
            scale = layout.factors(gradient_norm(self.slices) if layout.needs_norm else 0.0)[0]
        device = next((shard.device for shard in layout.shards().values()), self.engine.device)
        sums = torch.zeros(len(layout.params), per_layer, dtype=torch.float64, device=device)
        for part in self.slices.with_gradient(client.state):
            w, g = part.weights().float(), part.gradient().to(device, torch.float32)
            terms = client.layer_terms(
                client.param_groups[part.group], part.state(client.state), w, g if scale == 1.0 else g * scale
            )
            sums.index_add_(0, part.on(device).params, segment_sums(terms, part))
        sums = self._all_reduce(sums)
        if not final:
            scale = layout.factors(float(sums[:, -1].sum()) ** 0.5)[0]
        client.take_sums(sums.tolist(), scale)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self.layout.world > 1:
            tensor = tensor.to(self.engine.device)
            dist.all_reduce(tensor, group=self.engine.seq_data_parallel_group)
        return tensor.cpu()
