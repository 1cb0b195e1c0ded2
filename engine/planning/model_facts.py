"""What a plan has to know of a model and its optimizer: parameters, how modules use them, where their shards lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from engine.config import RunConfig
from engine.errors import ConfigError
from engine.modeling.recompute import is_recomputed
from engine.optim.agvm import BUCKET_SIZE, AGVMOptimizer
from engine.optim.registry import OURS, is_modulated, sums_per_layer
from engine.zero.geometry import Geometry, Replicas, Sharding
from engine.zero.recording import Use
from models.batch_norm import Fp32BatchNorm


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


class WindowSettings(NamedTuple):
    """What an AGVM window captures: `signed` and `squared` reduce a second vector, `norms` does not."""

    kind: str
    bucket_size: int = BUCKET_SIZE


class SyncedNorm(NamedTuple):
    """A batch norm with statistics over all ranks, and how often it runs forward in a micro-step."""

    channels: int
    forward: int = 1


@dataclass(frozen=True)
class ModelFacts:
    """`uses` says how modules use parameters (for ZeRO-3), `layer_sums` how many numbers of each layer LARS or LAMB sum
    over all ranks. `buffers` is in bytes."""

    parameters: Sequence[Parameter]
    uses: Sequence[Use] = ()
    norms: Sequence[SyncedNorm] = ()
    buffers: int = 0
    window: WindowSettings | None = None
    layer_sums: int = 0

    @cached_property
    def total(self) -> int:
        return sum(p.numel for p in self.parameters)

    @cached_property
    def trained(self) -> int:
        return sum(p.numel for p in self.parameters if p.trained)


def model_facts(model: nn.Module, optimizer: Optimizer, config: RunConfig) -> ModelFacts:
    """Before DeepSpeed puts its own tensors into the optimizer's groups."""
    return ModelFacts(
        parameters_of(model, optimizer.param_groups),
        model_uses(model),
        synced_norms(model),
        sum(b.numel() * b.element_size() for b in model.buffers()),
        window_settings(config.optimizer.type, config.optimizer.params),
        sums_per_layer(config.optimizer.type),
    )


def model_uses(model: nn.Module) -> list[Use]:
    """Each module once, in the order of definition, forward and then back; checkpointed blocks forward again.

    What really runs may differ (a head runs on every level, a branch is skipped): a recorded order is exact.
    """
    places = {id(p): i for i, p in enumerate(model.parameters())}
    trained = [p.requires_grad for p in model.parameters()]
    numbers = {module: k for k, module in enumerate(model.modules())}

    def visit(module: nn.Module, *, backward: bool) -> list[Use]:
        members = tuple(sorted(places[id(p)] for p in module.parameters(recurse=False)))
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        inner = [use for child in children[:: -1 if backward else 1] for use in visit(child, backward=backward)]
        uses = [Use(numbers[module], members, True), *inner, Use(numbers[module], members, False)]
        if backward and is_recomputed(module):
            uses = [*visit(module, backward=False), *uses]
        return uses

    # Backward ends at the first trained parameter: nothing in front of it needs a gradient.
    first = next((i for i, value in enumerate(trained) if value), len(trained))
    back = [use for use in visit(model, backward=True) if not use.members or max(use.members) >= first]
    return [*visit(model, backward=False), *back]


def synced_norms(model: nn.Module) -> list[SyncedNorm]:
    """Each is assumed to run once a micro-step, and once more where it is recomputed."""
    blocks = tuple(f"{name}." for name, module in model.named_modules() if is_recomputed(module))
    return [
        SyncedNorm(module.num_features, forward=2 if name.startswith(blocks) else 1)
        for name, module in model.named_modules()
        if isinstance(module, Fp32BatchNorm) and module.synchronise and module.training
    ]


def window_settings(kind: str, params: Mapping[str, Any]) -> WindowSettings | None:
    """From the optimizer's name and its params; None where it is not AGVM."""
    rule = OURS.get(kind)
    if rule is None or not issubclass(rule, AGVMOptimizer):
        return None
    size = params.get("bucket_size")
    return WindowSettings(rule.companion_of(params.get("estimator", "halves")), BUCKET_SIZE if size is None else size)


def stage_refused(config: RunConfig, stage: int) -> bool:
    """Whether AGVM and layer-wise rules refuse a stage that DeepSpeed itself accepts (engine/zero/support.py)."""
    kind, fp16 = config.optimizer.type, config.deepspeed.get("fp16", {})
    return stage == 0 and bool(fp16.get("enabled")) and (is_modulated(kind) or sums_per_layer(kind) > 0)


def refuse_sam(config: RunConfig) -> None:
    if config.optimizer.sam is not None:
        raise ConfigError("a run with optimizer.sam is not planned: leave it out, and count every micro-step twice")


class ModuleShare(NamedTuple):
    """How the trained elements of a module are spread over the ranks."""

    module: str
    numel: int
    least: int
    mean: float
    greatest: int
    empty: int  # ranks that hold none of it


@dataclass(frozen=True)
class PlannedShards:
    """`parameters` are those of the geometry, in its order; `order` are their places in the model."""

    geometry: Geometry
    parameters: list[Parameter]
    order: list[int]

    def elements(self) -> dict[str, list[int]]:
        """How many elements of each module every rank owns."""
        owned: dict[str, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            counts = owned.setdefault(parameter.module, [0] * self.geometry.world)
            for rank, start, stop in self.geometry.ranges(i):
                counts[rank] += stop - start
        return owned

    def held_elements(self) -> dict[str, list[int]]:
        """How many elements of each module every rank holds: at stage 0 all, although each owns only its chunk."""
        elements = self.elements()
        if isinstance(self.geometry, Replicas):
            return {module: [sum(counts)] * self.geometry.world for module, counts in elements.items()}
        return elements

    def module_shares(self) -> list[ModuleShare]:
        totals = {module: sum(counts) for module, counts in self.elements().items()}
        return [
            ModuleShare(name, totals[name], min(held), sum(held) / len(held), max(held), held.count(0))
            for name, held in self.held_elements().items()
        ]


def plan_shards(parameters: Sequence[Parameter], sharding: Sharding, rank: int = 0) -> PlannedShards:
    """The shards of the trained parameters. Param groups are numbered from 0 without a gap."""
    groups = param_groups_of(parameters)
    if groups != list(range(len(groups))):
        raise ValueError(f"param groups must be numbered from 0 without a gap, got {groups}")
    order = sharding.order([[i for i, p in enumerate(parameters) if p.group == k and p.numel] for k in groups])
    own = [parameters[i] for i in order]
    geometry = sharding.geometry([p.numel for p in own], [p.group or 0 for p in own], rank)
    return PlannedShards(geometry, own, order)
