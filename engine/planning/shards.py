"""The shards of a run that is only planned: its parameters by name and size, and which rank holds how much of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from engine.zero.geometry import Fragment, Geometry, Replicas, Sharding


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
        parameters.append(Parameter(name, parameter.numel(), module, group))
    return parameters


def param_groups_of(parameters: Sequence[Parameter]) -> list[int]:
    return sorted({p.group for p in parameters if p.group is not None})


@dataclass(frozen=True)
class PlannedShards:
    """`parameters` are those of the geometry, in its order; `order` are their places in the model."""

    geometry: Geometry
    parameters: list[Parameter]
    order: list[int]

    @property
    def fragments(self) -> list[Fragment]:
        return self.geometry.fragments

    def elements(self) -> dict[str, list[int]]:
        """How many elements of each module every rank owns."""
        owned: dict[str, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            counts = owned.setdefault(parameter.module, [0] * self.geometry.world)
            for rank, start, stop in self.geometry.ranges(i):
                counts[rank] += stop - start
        return owned

    def held_elements(self) -> dict[str, list[int]]:
        """How many elements of each module every rank holds: at stage 0 all, though the sums are shared out."""
        elements = self.elements()
        if isinstance(self.geometry, Replicas):
            return {module: [sum(counts)] * self.geometry.world for module, counts in elements.items()}
        return elements

    def module_shares(self) -> list[ModuleShare]:
        totals = {module: sum(counts) for module, counts in self.elements().items()}
        return [
            ModuleShare(
                module,
                totals[module],
                min(counts),
                sum(counts) / self.geometry.world,
                max(counts),
                sum(count == 0 for count in counts),
            )
            for module, counts in self.held_elements().items()
        ]


class ModuleShare(NamedTuple):
    """How a module lies over the ranks, in elements of its trained parameters."""

    module: str
    numel: int
    least: int
    mean: float
    greatest: int
    empty: int  # ranks that hold none of it


def plan_shards(parameters: Sequence[Parameter], sharding: Sharding, rank: int = 0) -> PlannedShards:
    """The shards of the trained parameters. Param groups are numbered from 0 without a gap."""
    groups = param_groups_of(parameters)
    if groups != list(range(len(groups))):
        raise ValueError(f"param groups must be numbered from 0 without a gap, got {groups}")
    order = sharding.order([[i for i, p in enumerate(parameters) if p.group == k and p.numel] for k in groups])
    own = [parameters[i] for i in order]
    geometry = sharding.geometry([p.numel for p in own], [p.group or 0 for p in own], rank)
    return PlannedShards(geometry, own, order)
