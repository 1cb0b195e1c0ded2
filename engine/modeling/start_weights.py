"""Warnings about the weights that a run starts with: what is random although the detector's config means otherwise."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from engine.errors import first_of


def start_warnings(model: nn.Module, dropped: Sequence[str], filled: Collection[str]) -> list[str]:
    """`dropped`: weights that the detector's config would download. `filled`: tensors that a file has filled."""
    lines = []
    if dropped:
        lines.append(
            "the detector starts with random weights: nothing is downloaded, and its config names "
            f"{first_of(dropped, 3)}; give a file as {_option(dropped)}"
        )
    random = [name for name, p in model.named_parameters() if not p.requires_grad and name not in set(filled)]
    if random:
        lines.append(
            f"{len(random)} tensors are frozen and random, and will stay so ({first_of(random, 3)}): fill them with "
            f"detector.load_from, or train them{_how(model)}"
        )
    return lines


def _option(dropped: Sequence[str]) -> str:
    """A distilled detector's teacher has a file of its own."""
    names = ["detector.load_from"] * any(not place.startswith("teacher:") for place in dropped)
    names += ["detector.options.teacher_ckpt"] * any(place.startswith("teacher:") for place in dropped)
    return " and ".join(names)


def _how(model: nn.Module) -> str:
    stages = getattr(getattr(model, "backbone", None), "frozen_stages", -1)
    if not isinstance(stages, int) or stages < 0:
        return " (detector.frozen and requires_grad say what is frozen)"
    options = '"backbone.frozen_stages": -1'
    if getattr(model.backbone, "norm_eval", False):
        options += ', "backbone.norm_eval": false'
    return f" with detector.options {{{options}}}"
