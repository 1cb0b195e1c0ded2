"""`geometry.pt`: one small table of where the saving run's ranks kept every parameter, written by rank 0.

Which rank holds which range follows from the sizes of the parameters and where each begins: two numbers a parameter,
whatever the number of ranks. So a rank that resumes opens only the files that hold its ranges, and not those of all
ranks to ask each what is in it, which would be 230,000 at 480 ranks.

Older checkpoints have no such file: there every rank's own file is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.zero.geometry import Chunks, Geometry, Partitions, Replicas

NAME = "geometry.pt"


def as_table(geometry: Geometry) -> dict[str, Any]:
    """What `from_table` makes the same geometry of."""
    table: dict[str, Any] = {"kind": type(geometry).__name__, "numels": _whole(geometry.numels)}
    if isinstance(geometry, Partitions):
        table.update(groups=_whole(geometry.groups), positions=_whole(geometry.positions), sizes=_whole(geometry.sizes))
    elif isinstance(geometry, Chunks):
        table["homes"] = _whole(geometry.homes).view(-1, 2)
    return table


def from_table(table: Mapping[str, Any], world: int) -> Geometry:
    """The geometry of a run of `world` ranks; ValueError if the table is of no kind that is known here."""
    kind, numels = table["kind"], table["numels"].tolist()
    if kind == Replicas.__name__:
        return Replicas(numels, world, 0)
    if kind == Chunks.__name__:
        return Chunks(numels, world, 0, homes=[(shard, offset) for shard, offset in table["homes"].tolist()])
    if kind == Partitions.__name__:
        groups, positions, sizes = (table[key].tolist() for key in ("groups", "positions", "sizes"))
        return Partitions(numels, world, 0, groups=groups, positions=positions, sizes=sizes)
    raise ValueError(f"unknown geometry {kind!r}")


def _whole(numbers: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
