"""A tiny three-module model trained under DeepSpeed, and its plain twin fed the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine.optim import AGVMLAMB, AGVMLARS, AGVMSGD, LAMB, LARS, PMDLAMB, AGVMAdamW, module_groups
from engine.optim.reference import ReferenceAdamW, ReferenceSGD
from engine.optim.reference_layerwise import ReferenceLAMB, ReferenceLARS, ReferencePMDLAMB

_ADAMW, _LAMB = dict(lr=2**-7, weight_decay=2**-4), dict(lr=2**-6, weight_decay=2**-4)
_SGD = dict(lr=0.02, weight_decay=0.01, momentum=0.8)
_LARS = dict(lr=0.5, weight_decay=0.01, momentum=0.8, trust_coefficient=0.02)
# The optimizer, its twin, and options of their own.
RULES = {
    "adamw": (AGVMAdamW, ReferenceAdamW, _ADAMW),
    "sgd": (AGVMSGD, ReferenceSGD, _SGD),
    "lars": (LARS, ReferenceLARS, _LARS),
    "agvm_lars": (AGVMLARS, ReferenceLARS, _LARS),
    "lamb": (LAMB, ReferenceLAMB, _LAMB),
    "agvm_lamb": (AGVMLAMB, ReferenceLAMB, _LAMB),
    "pmdlamb": (PMDLAMB, ReferencePMDLAMB, {**_LAMB, "period": 4, "factor": 0.3}),
}
WITHOUT_AGVM = ("lars", "lamb", "pmdlamb")
MODULES = {"backbone": ["stem", "backbone"], "neck": ["neck"], "head": ["head"]}


class Tiny(nn.Module):
    """Odd sizes throughout, so that no world size divides them; `neck` is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3)
        self.backbone = nn.Sequential(nn.Linear(27, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 11))
        self.neck = nn.Linear(11, 11)
        self.head = nn.ModuleDict({"box": nn.Linear(11, 5), "score": nn.Linear(11, 1, bias=False)})

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, boxes: bool = True) -> torch.Tensor:
        z = self.backbone(torch.tanh(self.stem(x)).flatten(1))
        z = torch.tanh(self.neck(torch.tanh(self.neck(z))))
        loss = (self.head["score"](z) - y[:, :1]).square().mean()
        return loss + (self.head["box"](z) - y[:, 1:]).square().mean() if boxes else loss


def micro_batch(step: int, j: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10007 * step + j)
    x = torch.randn(3, 2, 5, 5, generator=generator)
    return x.to(dtype), (torch.randn(3, 6, generator=generator) + x.mean() * 3).to(dtype)


@dataclass(frozen=True)
class Case:
    stage: int
    accumulation: int
    rule: str = "adamw"
    estimator: str = "halves"
    precision: str = "fp32"
    steps: int = 30
    clip_grad: float = 0.0
    bucket_size: int = 61
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    agvm: dict[str, Any] = field(default_factory=dict)
    no_decay: bool = True

    def options(self) -> dict[str, Any]:
        agvm = dict(tau=3, alpha=0.7, anchor="backbone", estimator=self.estimator)
        return {**RULES[self.rule][2], **({} if self.rule in WITHOUT_AGVM else agvm), **self.agvm}

    @property
    def dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]


def deepspeed_config(case: Case) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip_grad,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 200,
            **case.zero,
        },
    }
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif case.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 10**6}
    return {**config, **case.config}


def build(
    case: Case,
    model: nn.Module,
    *,
    make: Callable | None = None,
    attach: bool = True,
    modules: dict[str, list[str]] | None = None,
) -> tuple[Any, Any]:
    import deepspeed

    if case.precision == "fp16":
        # DeepSpeed refuses fp16 on a CPU without AMX; torch computes it, slowly.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    rule = RULES[case.rule][0]
    groups = module_groups(model, modules or MODULES, no_decay=case.no_decay)
    optimizer = rule(groups, **case.options()) if make is None else make(groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(case))
    if attach and make is None:
        optimizer.attach(engine, **({} if case.rule in WITHOUT_AGVM else {"bucket_size": case.bucket_size}))
    return engine, optimizer


def take_step(engine: Any, case: Case, step: int, *, loss: Callable | None = None) -> None:
    """One optimizer step: K micro-batches of this rank."""
    for k in range(case.accumulation):
        j = k * dist.get_world_size() + dist.get_rank()
        x, y = micro_batch(step, j, case.dtype)
        value = engine(x, y) if loss is None else loss(engine, x, y, step, j)
        engine.backward(value)
        engine.step()


def by_module(model: nn.Module, pick: Callable) -> dict[str, list[torch.Tensor]]:
    """What `pick` makes of each parameter that was trainable at the start."""
    return {
        module: [
            pick(p)
            for name, p in model.named_parameters()
            if name.split(".")[0] not in getattr(model, "frozen", ())
            and any(name.startswith(f"{x}.") for x in prefixes)
        ]
        for module, prefixes in MODULES.items()
    }


def micro_gradients(model: nn.Module, step: int, total: int, loss: Callable | None = None) -> list[dict]:
    """u[j] of the plain model, zeros where a parameter got none."""
    gradients = []
    for j in range(total):
        x, y = micro_batch(step, j, next(model.parameters()).dtype)
        model.zero_grad()
        (model(x, y) if loss is None else loss(model, x, y, step, j)).backward()
        gradients.append(
            by_module(model, lambda p: (torch.zeros_like(p) if p.grad is None else p.grad).clone().float())
        )
    return gradients


class PlainRun:
    """The reference twin on a model of its own; in bf16 and fp16 it computes gradients in that type too."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        reference = RULES[case.rule][1]
        self.masters = by_module(model, lambda p: p.data.to(case.dtype).float().clone())
        self.twin = reference(self.masters, max_norm=case.clip_grad, **case.options())
        self.model, self.total = model.to(case.dtype), dist.get_world_size() * case.accumulation

    def step(self, step: int, loss: Callable | None = None) -> None:
        self.twin.step(micro_gradients(self.model, step, self.total, loss))
        for module, weights in by_module(self.model, lambda p: p.data).items():
            for weight, master in zip(weights, self.masters[module]):
                weight.copy_(master)

    def weights(self) -> list[torch.Tensor]:
        return [w for module in self.masters.values() for w in module]


def full_weights(engine: Any) -> list[torch.Tensor]:
    """fp32 weights of every trainable parameter, whole, on every rank, in module order."""
    from deepspeed.utils import safe_get_full_fp32_param

    def whole(p: nn.Parameter) -> torch.Tensor:
        # In fp32 the parameter is the master; DeepSpeed 0.19.8's accessor is wrong under round_robin_gradients.
        plain = not engine.zero_optimization() or (p.dtype == torch.float32 and not hasattr(p, "ds_id"))
        return (p.data if plain else safe_get_full_fp32_param(p)).detach().clone().float()

    return [w for module in by_module(engine.module, whole).values() for w in module]


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Norm of the difference of all weights, relative to their norm."""
    a, b = (torch.cat([x.double().view(-1) for x in weights]) for weights in (first, second))
    return float((a - b).norm() / b.norm())


def relative(first: dict[str, float], second: dict[str, float]) -> float:
    assert first.keys() == second.keys(), (first, second)
    return max((abs(first[i] - second[i]) / max(abs(second[i]), 1e-12) for i in first), default=0.0)


def follow(case: Case, *, loss: Callable | None = None, prepare: Callable | None = None) -> dict[str, Any]:
    """Train both; the largest relative differences of phi, mu (at any step) and weights (at the end), on rank 0."""
    torch.manual_seed(1)
    model = Tiny()
    if prepare is not None:
        prepare(model)
    case = replace(case, no_decay=False)
    plain = PlainRun(case, copy.deepcopy(model)) if dist.get_rank() == 0 else None
    engine, optimizer = build(case, model)
    worst: dict[str, Any] = {"phi": 0.0, "mu": 0.0, "weights": 0.0}
    for step in range(1, case.steps + 1):
        take_step(engine, case, step, loss=loss)
        if plain is not None:
            plain.step(step, loss)
            if case.rule not in WITHOUT_AGVM:
                worst["phi"] = max(worst["phi"], relative(optimizer.phi, plain.twin.phi))
                worst["mu"] = max(worst["mu"], relative(optimizer.mu, plain.twin.mu))
    weights = full_weights(engine)
    if plain is not None:
        worst["weights"] = difference(weights, plain.weights())
    if case.rule in WITHOUT_AGVM:
        worst["own"] = {"ratios": optimizer.ratios}
    else:
        worst["own"] = {"phi": optimizer.phi, "mu": optimizer.mu, **optimizer.agvm_state_dict()}
    close(engine, optimizer)
    return worst


def close(engine: Any, optimizer: Any) -> None:
    if hasattr(optimizer, "detach"):
        optimizer.detach()
    engine.destroy()


def follow_all(cases: list[Case]) -> list[dict[str, float]]:
    return [follow(case) for case in cases]
