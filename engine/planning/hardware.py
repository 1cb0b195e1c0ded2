"""A GPU and its machine as a few numbers. Each can be changed by hand.

Peaks, memory and memory bandwidth are the vendor's figures for the SXM cards; fp32 on Ampere and later is TF32, as
torch computes convolutions there. Bandwidths are for one direction. `efficiency` is the share of peak and of memory
bandwidth that a detector in eager PyTorch reaches: a measured step replaces it (`--measured-step`, `--calibrate`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class Hardware:
    name: str
    memory: float  # bytes of a card
    reserved: float = 1.5e9  # bytes of it that the driver, the libraries and NCCL take
    fragmentation: float = 0.06  # share of what is used that the allocator and kernels' workspaces add
    float32: float  # FLOP/s
    bfloat16: float
    float16: float
    memory_bandwidth: float  # byte/s
    efficiency: float = 0.35
    launch: float = 1.2e-5  # seconds that an operator takes at least
    gpus_per_node: int = 8
    intra_bandwidth: float  # byte/s from a card to its neighbours in the node
    inter_bandwidth: float  # byte/s of a card's share of the network
    latency: float = 1.5e-5  # seconds of a collective for each doubling of the ranks
    host_bandwidth: float = 2.0e10  # byte/s between card and host, for offloading
    disk: float = 2.0e9  # byte/s that all ranks write together

    def peak(self, dtype: str) -> float:
        return getattr(self, dtype) if dtype in ("float32", "bfloat16", "float16") else self.float32

    def usable(self) -> float:
        """Bytes of live tensors that fit."""
        return (self.memory - self.reserved) / (1 + self.fragmentation)

    def bus(self, world: int) -> float:
        """Bytes a second that a rank sends in a ring over `world` ranks.

        Inside a node by its own links; beyond, rings share all network cards of the node.
        """
        if world <= self.gpus_per_node:
            return self.intra_bandwidth
        return min(self.intra_bandwidth, self.inter_bandwidth * self.gpus_per_node)


_MAY_BE_ZERO = ("reserved", "fragmentation", "latency", "launch")
_FIELDS = ("memory", "memory_bandwidth", "float32", "bfloat16", "float16", "intra_bandwidth", "inter_bandwidth")
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "a100-80g": (80e9, 2.039e12, 156e12, 312e12, 312e12, 240e9, 25e9),
    "a100-40g": (40e9, 1.555e12, 156e12, 312e12, 312e12, 240e9, 25e9),
    "h100-80g": (80e9, 3.35e12, 494e12, 989e12, 989e12, 360e9, 50e9),
    "v100-32g": (32e9, 0.9e12, 15.7e12, 15.7e12, 125e12, 120e9, 12.5e9),  # without bf16: it is computed in fp32
    # One core of a server CPU without bf16 arithmetic, as one rank: for plans of tests and demos.
    "cpu-core": (12e9, 10e9, 60e9, 20e9, 20e9, 1.5e9, 1e9),
}
_CPU: dict[str, Any] = dict(reserved=1.0e9, launch=2e-5, gpus_per_node=64, latency=2e-4, host_bandwidth=10e9, disk=2e8)
CARDS = {
    name: Hardware(name=name, **dict(zip(_FIELDS, numbers)), **(_CPU if name == "cpu-core" else {}))
    for name, numbers in _NUMBERS.items()
}


def find_hardware(name: str, changes: Sequence[str] = ()) -> Hardware:
    """A card by name, or a JSON file of the fields (with "base" to change a known one); then KEY=NUMBER changes."""
    if name in CARDS:
        hardware = CARDS[name]
    elif Path(name).is_file():
        hardware = _from_file(Path(name))
    else:
        raise UserError(
            f'there is no card "{name}"{nearest(name, CARDS)}: give one of {", ".join(CARDS)}, or a JSON file'
        )
    for change in changes:
        key, _, text = change.partition("=")
        hardware = _changed(hardware, {key: text}, f"--set-hardware {change}")
    return hardware


def _from_file(path: Path) -> Hardware:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict) or values.get("base") not in CARDS:
        raise UserError(
            f'{path} must be a JSON object with "base", one of {", ".join(CARDS)}, and the fields that differ'
        )
    base = CARDS[values.pop("base")]
    return _changed(replace(base, name=str(values.pop("name", path.stem))), values, str(path))


def _changed(hardware: Hardware, values: dict[str, Any], source: str) -> Hardware:
    known = [field.name for field in fields(Hardware) if field.name != "name"]
    for key, value in values.items():
        if key not in known:
            raise UserError(
                f'{source}: "{key}" is no number of a card{nearest(key, known)}: they are {", ".join(known)}'
            )
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not 0 <= number < float("inf") or (number == 0 and key not in _MAY_BE_ZERO):
            raise UserError(f"{source}: {key} must be a positive number, got {value!r}")
        if key == "gpus_per_node" and number != int(number):
            raise UserError(f"{source}: {key} must be a whole number >= 1, got {value!r}")
        changed: Any = int(number) if key == "gpus_per_node" else number
        hardware = replace(hardware, **{key: changed})
    return hardware
