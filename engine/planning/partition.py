"""Which rank owns which range of every parameter, at any number of ranks, without building a DeepSpeed engine.

The same layouts as `engine/zero/layout.py` reads off a running engine, from sizes alone, so that the rest of
`engine/zero` (bucket plans, ...) works on them too. Of DeepSpeed 0.19.8:

- stage 0: everything is on every rank; AGVM's sums take a chunk of ceil(numel / N) of each parameter;
- stages 1 and 2: the parameters of a param group end to end in one flat tensor, padded to a multiple of 2 N and cut
  into N equal pieces;
- stage 3: every parameter is cut into N chunks of ceil(numel / N), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from engine.config.errors import ConfigError
from engine.zero.layout import Flat, Fragment, Layout

_START_ALIGNMENT = 2  # elements: DeepSpeed's nccl_start_alignment_factor
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Parameter(NamedTuple):
    """What has to be known of a parameter. `group` is its param group, None where it is not trained."""

    name: str
    numel: int
    module: str
    group: int | None

    @property
    def trained(self) -> bool:
        return self.group is not None


def parameters_of(model: nn.Module, groups: Sequence[dict[str, Any]]) -> list[Parameter]:
    """In the order of `model.named_parameters()`; `groups` as `engine.optim.param_groups` makes them, before ZeRO."""
    home = {id(p): (k, group["module"]) for k, group in enumerate(groups) for p in group["params"]}
    parameters = []
    for name, parameter in model.named_parameters():
        group, module = home.get(id(parameter), (None, name.split(".")[0]))
        parameters.append(Parameter(name, getattr(parameter, "ds_numel", parameter.numel()), module, group))
    return parameters


@dataclass(frozen=True)
class Sharding:
    """The settings that decide where shards lie."""

    stage: int
    world: int
    dtype: str = "float32"
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    sub_group_size: int = 10**9

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if isinstance(self.world, bool) or not isinstance(self.world, int) or self.world < 1:
            raise ConfigError(f"the number of ranks must be a whole number >= 1, got {self.world!r}")


class _Planned:
    """A layout from sizes: `parameters` in the order of the shards, `order` their places in the model."""

    def _plan(self, parameters: Sequence[Parameter], order: Sequence[int], world: int, rank: int) -> None:
        self.parameters = [parameters[i] for i in order]
        self.order = list(order)
        self.params: list[Tensor] = []
        self.group = [p.group for p in self.parameters]
        self.world, self.rank = world, rank
        self._fragments: list[Fragment] | None = None

    def numel(self, i: int) -> int:
        return self.parameters[i].numel

    @property
    def fragments(self) -> list[Fragment]:
        """Of this rank, made when first asked for."""
        if self._fragments is None:
            self._fragments = [
                Fragment(i, start, stop, *self.place(i, start))
                for i in range(len(self.parameters))
                for rank, start, stop in self.ranges(i)
                if rank == self.rank
            ]
        return self._fragments

    def elements(self) -> dict[str, list[int]]:
        """How many elements of each module every rank owns."""
        owned: dict[str, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            counts = owned.setdefault(parameter.module, [0] * self.world)
            for rank, start, stop in self.ranges(i):
                counts[rank] += stop - start
        return owned


class PlannedChunks(_Planned, Layout):
    """Stage 3, and stage 0 for AGVM's sums."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        order: Sequence[int],
        world: int,
        rank: int,
        *,
        sharded: bool,
        sub_group_size: int,
    ) -> None:
        self._plan(parameters, order, world, rank)
        self.keeps_local = not sharded
        self.sharded = sharded
        self.homes: list[tuple[int, int]] = []  # sub-group and offset in it
        shard, offset = -1, 0
        for i, group in enumerate(self.group):
            if i == 0 or group != self.group[i - 1] or offset >= sub_group_size:
                shard, offset = shard + 1, 0
            self.homes.append((shard, offset))
            offset += self.chunk(i)

    @property
    def sub_groups(self) -> int:
        """How many flat tensors a rank's shard is made of."""
        return self.homes[-1][0] + 1 if self.homes else 0

    def place(self, i: int, start: int) -> tuple[int, int]:
        return self.homes[i] if self.sharded else (i, start)

    def padding(self) -> int:
        """Elements over all ranks that belong to no parameter."""
        return (
            sum(self.chunk(i) * self.world - self.numel(i) for i in range(len(self.parameters))) if self.sharded else 0
        )


class PlannedFlat(_Planned, Flat):
    """Stages 1 and 2."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        order: Sequence[int],
        world: int,
        rank: int,
        *,
        alignment: int,
        stage: int,
    ) -> None:
        self._plan(parameters, order, world, rank)
        self.keeps_local = stage == 1
        self.position: list[int] = []
        filled: dict[int, int] = {}
        for i, group in enumerate(self.group):
            start = filled.get(group, 0)
            start += -start % alignment
            self.position.append(start)
            filled[group] = start + self.numel(i)
        whole = _START_ALIGNMENT * world
        self.sizes = [math.ceil(filled[group] / whole) * whole // world for group in sorted(filled)]

    def padding(self) -> int:
        return sum(self.sizes) * self.world - sum(p.numel for p in self.parameters)


def plan_layout(parameters: Sequence[Parameter], sharding: Sharding, rank: int = 0) -> PlannedChunks | PlannedFlat:
    """The layout of the trained parameters on a rank. Groups are numbered from 0 without a gap."""
    groups = sorted({p.group for p in parameters if p.trained})
    if groups != list(range(len(groups))):
        raise ValueError(f"param groups must be numbered from 0 without a gap, got {groups}")
    members = [[i for i, p in enumerate(parameters) if p.group == k and p.numel] for k in groups]
    if sharding.stage in (1, 2):
        if sharding.round_robin_gradients:
            members = [
                [i for first in range(min(sharding.world, len(group))) for i in group[first :: sharding.world]]
                for group in members
            ]
        size = BYTES[sharding.dtype]
        alignment = 16 // math.gcd(16, size) if sharding.parameter_alignment else 1
        return PlannedFlat(
            parameters, sum(members, []), sharding.world, rank, alignment=alignment, stage=sharding.stage
        )
    return PlannedChunks(
        parameters,
        sum(members, []),
        sharding.world,
        rank,
        sharded=sharding.stage == 3,
        sub_group_size=sharding.sub_group_size,
    )


class ModuleShare(NamedTuple):
    """How a module lies over the ranks, in elements of its trained parameters."""

    module: str
    numel: int
    least: int
    mean: float
    greatest: int
    empty: int  # ranks that hold none of it

    @property
    def imbalance(self) -> float:
        """The greatest share over the mean one: 1 is even, N is all on one rank."""
        return self.greatest / self.mean


def held_elements(layout: PlannedChunks | PlannedFlat) -> dict[str, list[int]]:
    """How many elements of each module every rank holds: at stage 0 all, though its sums are divided among the ranks."""
    elements = layout.elements()
    if isinstance(layout, PlannedChunks) and not layout.sharded:
        return {module: [sum(counts)] * layout.world for module, counts in elements.items()}
    return elements


def module_shares(layout: PlannedChunks | PlannedFlat) -> list[ModuleShare]:
    """One line for each module."""
    totals = {module: sum(counts) for module, counts in layout.elements().items()}
    return [
        ModuleShare(
            module,
            totals[module],
            min(counts),
            sum(counts) / layout.world,
            max(counts),
            sum(count == 0 for count in counts),
        )
        for module, counts in held_elements(layout).items()
    ]
