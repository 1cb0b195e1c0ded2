"""What a rank is running on. Nothing here talks to other ranks. Of the environment only a list of variables is read."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import engine
from engine import distributed

# A bug report goes to strangers: no variable outside this list is written down.
VARIABLES = (
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "DS_ACCELERATOR",
    "SLURM_NTASKS",
    "SLURM_NNODES",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
)
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "RCCL_", "CCL_")

_PACKAGES = {  # by the name that users know: the distributions that may provide it
    "torch": ("torch",),
    "torchvision": ("torchvision",),
    "deepspeed": ("deepspeed",),
    "mmdet": ("onedl-mmdetection", "mmdet"),
    "mmcv": ("onedl-mmcv", "mmcv"),
    "mmengine": ("onedl-mmengine", "mmengine"),
    "timm": ("timm",),
    "numpy": ("numpy",),
}


def rank_facts() -> dict[str, Any]:
    """Everything about this rank, for the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = Path("/dev/shm")
    return {
        "rank": distributed.rank(),
        "host": socket.gethostname(),
        "versions": versions(),
        "code": code_digest(),
        "accelerator": accelerator(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "open_files": {"soft": soft, "hard": hard},
        "shared_memory": shutil.disk_usage(shared).total if shared.is_dir() else None,
        "network": network(),
        "environment": variables(),
    }


def variables() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name in VARIABLES or name.startswith(PREFIXES)}


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "gigadet": engine.__version__}
    for name, distributions in _PACKAGES.items():
        found[name] = next((version for version in map(_version, distributions) if version), "missing")
    found["mmcv ops"] = "compiled" if compiled_ops() else "ours"
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiled_ops() -> bool:
    """Whether mmcv has compiled ops; else `models.mmcv_kernels` takes their place."""
    mmcv = importlib.util.find_spec("mmcv")
    if mmcv is None:
        return False
    return importlib.machinery.PathFinder.find_spec("mmcv._ext", mmcv.submodule_search_locations) is not None


@functools.cache
def code_digest() -> str:
    """A digest of our own source: nodes with copies of different age have the same version."""
    digest = hashlib.sha256()
    root = Path(engine.__file__).parent.parent
    for package in ("engine", "models", "launch"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def accelerator() -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator  # here: importing DeepSpeed takes seconds

    current = get_accelerator()
    device = distributed.device()
    facts: dict[str, Any] = {
        "name": current.device_name(),
        "device": str(device),
        "devices": current.device_count(),
        "backend": dist.get_backend() if dist.is_initialized() else current.communication_backend_name(),
        "bf16": bool(current.is_bf16_supported()),
        "fp16": bool(current.is_fp16_supported()),
        "tf32": None,
    }
    if device.type != "cpu":
        facts["memory"] = current.total_memory()
        module = torch.get_device_module(device)
        if hasattr(module, "get_device_properties"):
            properties = module.get_device_properties(device)
            facts["model"] = getattr(properties, "name", None)
            facts["uuid"] = str(getattr(properties, "uuid", "")) or None
            if hasattr(properties, "major") and torch.version.cuda:
                facts["tf32"] = properties.major >= 8
                facts["capability"] = f"{properties.major}.{properties.minor}"
    if facts["backend"] == "nccl":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def network() -> dict[str, Any]:
    """The addresses of this host, and which of its interfaces leads to rank 0."""
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    own = address_towards(master)
    leading = next((name for name, entries in addresses.items() if own in entries), None)
    if leading is None and own is not None and own.startswith("127."):
        leading = "lo"  # all of 127/8 is the loopback device, which lists one address
    return {
        "interfaces": {name: entries for name, entries in addresses.items() if entries},
        "master": master,
        "own_address": own,
        "interface": leading,
    }


def address_towards(host: str) -> str | None:
    """The address this host would send from. Connecting a UDP socket sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return None
