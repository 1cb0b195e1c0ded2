"""Which batch norms talk to other ranks, and how often in a micro-step."""

from __future__ import annotations

from torch import nn

from engine.modeling.recompute import is_recomputed
from engine.optim.modules import detector_modules
from engine.planning.traffic import SyncedNorm


def synced_norms(model: nn.Module) -> list[SyncedNorm]:
    """Each taken to run once a micro-step, and once more where it is recomputed."""
    from models.batch_norm import Fp32BatchNorm

    blocks = tuple(f"{name}." for name, module in model.named_modules() if is_recomputed(module))
    homes = detector_modules(model)
    norms = []
    for name, module in model.named_modules():
        if isinstance(module, Fp32BatchNorm) and module.synchronise and module.training:
            home = next(
                (home for home, prefixes in homes.items() if any(name.startswith(f"{prefix}.") for prefix in prefixes)),
                name.split(".")[0],
            )
            norms.append(SyncedNorm(module.num_features, home, forward=2 if name.startswith(blocks) else 1))
    return norms
