"""Assign parameters to modules, and build param groups that name their module.

AGVM has one learning-rate factor per module (backbone, neck, RPN head, ...). A param group carries the name of its
module under `module`. There is one group per (module, weight decay): ZeRO is slow with many small groups.

The modules of a detector are its backbone, neck, encoder, decoder and heads. A small part beside them (an embedding of
queries, a norm) belongs to a neighbour: the variance of so few numbers is noise, and its mu would run away. The rules
are the tables below; `optimizer.params.modules` overrides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from torch import nn

from engine.zero.scalars import whole_shape

# Parts that are divided into their children: the paper's bbox head and mask head are inside `roi_head`, and the head of
# MaskFormer and Mask2Former is most of the detector.
DIVIDED = ("roi_head", "panoptic_head")
# Parts that are modules of their own, by their last name, unless they are nothing but embeddings: the RPN head
# of Sparse R-CNN is a list of boxes.
MODULES = ("backbone", "neck", "encoder", "decoder", "*_head")
# Parts that belong to another module, by their name in the detector; the first module that exists takes them.
JOINED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("panoptic_head.pixel_decoder", ("pixel_decoder",)),
    ("panoptic_head.transformer_decoder", ("transformer_decoder",)),
    ("panoptic_head.cls_embed", ("predictor",)),
    ("panoptic_head.mask_embed", ("predictor",)),
    ("panoptic_head.*", ("transformer_decoder",)),
    ("roi_head.mask_roi_extractor", ("mask_head", "bbox_head")),
    ("roi_head.semantic_roi_extractor", ("semantic_head", "bbox_head")),
    ("level_embed", ("encoder",)),
    ("memory_trans_*", ("encoder",)),  # from the encoder's output to the proposals of a two-stage DETR
    ("positional_encoding", ("encoder",)),
)
NEIGHBOURS = ("decoder", "bbox_head", "mask_head", "rpn_head", "backbone")  # of every other small part
SMALL = 1e-2  # share of the detector's parameters from which a part with another name is a module too


class _Part(NamedTuple):
    prefix: str
    size: int
    embeddings_only: bool = False

    @property
    def name(self) -> str:
        return self.prefix.rsplit(".", 1)[-1]


def detector_modules(model: nn.Module) -> dict[str, list[str]]:
    """The modules of an mmdet detector by the rules above: name -> prefixes of parameter names.

    A part of `roi_head` keeps its own name (`bbox_head`), unless the detector has a child of the same name.
    """
    parts = list(_parts(model))
    total = sum(part.size for part in parts)
    outer = {name for name, _ in model.named_children()}
    modules: dict[str, list[str]] = {}
    left: list[tuple[_Part, tuple[str, ...]]] = []
    for part in parts:
        wanted = next((names for pattern, names in JOINED if fnmatch(part.prefix, pattern)), None)
        if wanted is not None and part.prefix.startswith("panoptic_head."):
            modules.setdefault(wanted[0], []).append(part.prefix)
        elif wanted is None and _stands_alone(part, total):
            modules[part.prefix if part.prefix != part.name and part.name in outer else part.name] = [part.prefix]
        else:
            left.append((part, (wanted or ()) + NEIGHBOURS))
    for part, neighbours in left:
        home = next((name for name in neighbours if name in modules), next(iter(modules), part.name))
        modules.setdefault(home, []).append(part.prefix)
    return modules


def _parts(model: nn.Module) -> Iterator[_Part]:
    """Children of the detector, or of a divided child, and parameters between them."""
    for part in _children(model, ""):
        if part.prefix in DIVIDED:
            yield from _children(model.get_submodule(part.prefix), f"{part.prefix}.")
        else:
            yield part


def _children(module: nn.Module, path: str) -> Iterator[_Part]:
    for name, child in module.named_children():
        size = sum(whole_shape(p).numel() for p in child.parameters())
        owners = [part for part in child.modules() if next(part.parameters(recurse=False), None) is not None]
        if size:
            yield _Part(path + name, size, all(isinstance(owner, nn.Embedding) for owner in owners))
    yield from (_Part(path + name, whole_shape(p).numel()) for name, p in module.named_parameters(recurse=False))


def _stands_alone(part: _Part, total: int) -> bool:
    named = any(fnmatch(part.name, pattern) for pattern in MODULES)
    return not part.embeddings_only and (named or part.size >= SMALL * total)


def describe_modules(groups: Sequence[Mapping[str, Any]], modules: Mapping[str, Sequence[str]]) -> str:
    """Each module with its trained parameters in millions, and the parts in it that have other names."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group["module"]] = sizes.get(group["module"], 0) + sum(whole_shape(p).numel() for p in group["params"])
    texts = []
    for module, size in sizes.items():
        others = [prefix for prefix in modules.get(module, ()) if prefix.rsplit(".", 1)[-1] != module]
        texts.append(f"{module} {size / 1e6:.2f}M" + (f" (with {', '.join(others)})" if others else ""))
    return ", ".join(texts)


def module_groups(
    model: nn.Module,
    modules: Mapping[str, Sequence[str]] | None = None,
    *,
    weight_decay: float | None = None,
    no_decay: bool | Callable[[str, nn.Parameter], bool] = False,
) -> list[dict[str, Any]]:
    """Param groups of the trainable parameters, one per (module, weight decay).

    `modules` maps a name to prefixes of parameter names (`neck` covers `neck` and `neck.*`); by default
    `detector_modules` finds them. With `no_decay` True, parameters of at most one dimension (norms, biases) get weight
    decay 0; a predicate (name, parameter) chooses others. `weight_decay` is for the rest (default: the optimizer's).
    """
    modules = detector_modules(model) if modules is None else modules
    excluded = no_decay if callable(no_decay) else lambda name, parameter: no_decay and len(whole_shape(parameter)) <= 1
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for module in modules:
        for plain in (False, True):
            groups[module, plain] = {"params": [], "module": module}
            if plain:
                groups[module, plain]["weight_decay"] = 0.0
            elif weight_decay is not None:
                groups[module, plain]["weight_decay"] = weight_decay
    for name, parameter in model.named_parameters():
        module = module_of(name, modules)
        if parameter.requires_grad:
            groups[module, bool(excluded(name, parameter))]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def module_of(name: str, modules: Mapping[str, Sequence[str]]) -> str:
    """The module whose prefixes cover a parameter; ValueError if there is none, or more than one."""
    homes = [module for module, prefixes in modules.items() if any(covers(prefix, name) for prefix in prefixes)]
    if len(homes) == 1:
        return homes[0]
    found = f"modules {', '.join(homes)}" if homes else f"none of the modules {', '.join(modules)}"
    raise ValueError(
        f'parameter "{name}" is in {found}: list it under exactly one name in "modules" (optimizer.params.modules)'
    )


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")
