"""This rank's partition in flat slices: gradient, optimizer state and weights of many fragments at a time.

A sum over a partition would otherwise take some twenty kernels for each of the thousands of fragments of a big model. A
slice joins fragments of one param group up to a limit of elements, so that the number of kernels depends on the size of
the partition and not on the number of parameters. It is copied only where it is not contiguous already.

Sums are exact to about 1e-8: in fp32 within a slice, where torch's `sum` adds pairwise, and in fp64 over slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.zero.geometry import Fragment
from engine.zero.layout import Layout, squared_norm

State = Mapping[Tensor, Mapping[str, Any]]


class Piece(NamedTuple):
    """Elements [start, stop) of a fragment, which begin at `home` in the partition. `side`: see `halves.py`."""

    fragment: Fragment
    start: int
    stop: int
    home: int
    side: int = 0


def slice_limit(device: torch.device, most: int = 1 << 22) -> int:
    """Elements of a slice: what stays in a CPU's cache, and enough to fill a GPU."""
    return max(1024, min(1 << 16 if device.type == "cpu" else 1 << 22, most))


def whole_fragments(layout: Layout) -> list[Piece]:
    pieces, home = [], 0
    for fragment in layout.fragments:
        length = fragment.stop - fragment.start
        pieces.append(Piece(fragment, 0, length, home))
        home += length
    return pieces


class Indices(NamedTuple):
    params: Tensor
    lengths: Tensor


@dataclass
class Slice:
    """Pieces of one param group and one side."""

    layout: Layout
    pieces: list[Piece]
    _indices: dict[torch.device, Indices] = field(default_factory=dict)

    @property
    def group(self) -> int:
        return self.layout.group[self.pieces[0].fragment.param]

    @property
    def side(self) -> int:
        return self.pieces[0].side

    @cached_property
    def params(self) -> list[int]:
        return [piece.fragment.param for piece in self.pieces]

    @cached_property
    def lengths(self) -> list[int]:
        return [piece.stop - piece.start for piece in self.pieces]

    def on(self, device: torch.device) -> Indices:
        """Parameters and lengths of the pieces as tensors, copied to the device once."""
        if device not in self._indices:
            self._indices[device] = Indices(*(torch.tensor(x, device=device) for x in (self.params, self.lengths)))
        return self._indices[device]

    def gradient(self) -> Tensor:
        """As DeepSpeed holds it: still scaled and not clipped."""
        found = (self.layout.gradient(piece.fragment) for piece in self.pieces)
        return _joined([g[piece.start : piece.stop] for g, piece in zip(found, self.pieces) if g is not None])

    def of(self, partition: Tensor) -> Tensor:
        return _joined([partition[a:b] for a, b in self._homes])

    def weights(self) -> Tensor:
        return _joined([shard.detach().reshape(-1)[a:b] for shard, a, b in self._ranges])

    def state(self, state: State) -> dict[str, Any]:
        """The optimizer state of the slice. Entries for the whole shard, such as `step`, stay as they are."""
        shard = self._ranges[0][0]
        own: dict[str, Any] = {}
        for key, value in state.get(shard, {}).items():
            if not _is_vector(value):
                own[key] = value
            elif value.numel() == shard.numel():
                own[key] = _joined([state[shard][key].reshape(-1)[a:b] for shard, a, b in self._ranges])
        return own

    @cached_property
    def _homes(self) -> list[tuple[int, int]]:
        return [(a, b) for _, a, b in _merged((None, p.home, p.home + p.stop - p.start) for p in self.pieces)]

    @cached_property
    def _ranges(self) -> list[tuple[Tensor, int, int]]:
        ranges = _merged(
            (p.fragment.shard, p.fragment.offset + p.start, p.fragment.offset + p.stop) for p in self.pieces
        )
        shards = {p.fragment.shard: self.layout.shard(p.fragment) for p in self.pieces}
        return [(shards[shard], a, b) for shard, a, b in ranges]


class Slices:
    """All slices of a rank. `limit` is in elements."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], limit: int) -> None:
        self.layout, self.limit = layout, limit
        ordered = sorted(pieces, key=lambda p: (layout.group[p.fragment.param], p.side, p.home))
        self.all = [Slice(layout, batch) for batch in self._batches(ordered)]

    def _batches(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        for _, members in groupby(pieces, key=lambda p: (self.layout.group[p.fragment.param], p.side)):
            batch, room = [], self.limit
            for piece in members:
                start = piece.start
                while start < piece.stop:
                    stop = min(piece.stop, start + room)
                    batch.append(piece._replace(start=start, stop=stop, home=piece.home + start - piece.start))
                    start, room = stop, room - (stop - start)
                    if room == 0:
                        yield batch
                        batch, room = [], self.limit
            if batch:
                yield batch

    def with_gradient(self, state: State, fired: Sequence[bool] | None = None) -> Iterator[Slice]:
        """The slices without the parameters that have no gradient, cut where the state has other entries or numbers.

        At stage 0 a frozen parameter has no gradient, and its state may have counted fewer steps. ZeRO-3 (and an
        offloaded ZeRO-1/2) still holds the previous step's gradient there: `fired` says which are new.
        """
        for part in self.all:
            present = [p for p in part.pieces if (fired is None or fired[p.fragment.param]) and self._has_gradient(p)]
            runs = [list(run) for _, run in groupby(present, key=lambda p: self._numbers(state, p.fragment))]
            if len(runs) == 1 and len(present) == len(part.pieces):
                yield part  # as it is, with what it has cached
            else:
                yield from (Slice(self.layout, run) for run in runs)

    def _has_gradient(self, piece: Piece) -> bool:
        return not self.layout.may_lack_gradient or self.layout.gradient(piece.fragment) is not None

    def _numbers(self, state: State, fragment: Fragment) -> tuple:
        own = state.get(self.layout.shard(fragment), {})
        return tuple((key, None if _is_vector(x) else id(x) if isinstance(x, Tensor) else x) for key, x in own.items())


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _merged(ranges: Iterable[tuple[Any, int, int]]) -> list[tuple[Any, int, int]]:
    """(label, start, stop) ranges, adjacent ones joined."""
    found: list[tuple[Any, int, int]] = []
    for label, start, stop in ranges:
        if found and found[-1][0] == label and found[-1][2] == start:
            found[-1] = (label, found[-1][1], stop)
        else:
            found.append((label, start, stop))
    return found


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gradient_norm(slices: Slices) -> float:
    """|g| over all parameters and ranks, as DeepSpeed holds it: one all-reduce of one number."""
    layout = slices.layout
    square = gradient_square(slices)
    if layout.world > 1:
        dist.all_reduce(square, group=layout.engine.seq_data_parallel_group)
    return float(square) ** 0.5


def gradient_square(slices: Slices, fired: Sequence[bool] | None = None) -> Tensor:
    """|g|^2 of this rank's partition, on the engine's device."""
    total = torch.zeros((), dtype=torch.float64, device=slices.layout.engine.device)
    for part in slices.with_gradient({}, fired):
        total += squared_norm(part.gradient()).to(total.device)
    return total


def segment_sums(terms: Sequence[Tensor], part: Slice) -> Tensor:
    """For each of vectors that lie like a slice, its sums over the pieces: one row per piece, one column per vector."""
    device = terms[0].device
    if len(part.lengths) == 1:
        sums = [term.sum().view(1) for term in terms]
    else:
        # On the CPU torch adds a segment one by one, so in fp64.
        wide = [term.double() if device.type == "cpu" else term for term in terms]
        lengths = part.on(device).lengths
        sums = [torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True) for x in wide]
    return torch.stack(sums, 1).double()
