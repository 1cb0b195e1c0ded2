"""The facts of all ranks in a few lines, notes on what looks wrong, and checks that compare the ranks."""

from __future__ import annotations

from typing import Any

from engine.doctor.examination import Examination
from engine.doctor.finding import Finding, Skipped, memory
from engine.errors import first_of

FEW_FILES = 4096  # every rank opens sockets to others, and every loader process has pipes and shared memory
LITTLE_SHARED = 1e9  # loader processes hand over whole batches through /dev/shm


def show_facts(examination: Examination, ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]
    hosts = sorted({rank["host"] for rank in ranks})
    versions = dict(first["versions"])
    ops = "with compiled ops" if versions.pop("mmcv ops") == "compiled" else "with our own ops"
    versions["mmcv"] += f" {ops}"
    shown = ("gigadet", "python", "torch", "deepspeed", "mmdet", "mmcv", "timm")  # the file has more
    examination.fact("versions", ", ".join(f"{name} {versions[name]}" for name in shown))
    examination.fact("accelerator", _accelerator(first["accelerator"]))
    examination.fact(
        "hosts",
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)} "
        f"({first_of(hosts, 8)}), {first['cores']} cores, {memory(first['memory'])} of memory",
    )
    network = first["network"]
    others = [name for name in network["interfaces"] if name not in ("lo", network["interface"])]
    examination.fact(
        "network",
        f"{network['interface'] or 'no known interface'} ({network['own_address']}) leads to MASTER_ADDR "
        f"{network['master']}" + (f"; also {first_of(others, 8)}" if others else ""),
    )
    shared = first["shared_memory"]
    examination.fact(
        "limits",
        f"{first['open_files']['soft']} open files (at most {first['open_files']['hard']}), "
        f"/dev/shm {'missing' if shared is None else memory(shared)}, "
        f"OMP_NUM_THREADS {first['environment'].get('OMP_NUM_THREADS', 'not set')}",
    )
    for text in notes(ranks):
        examination.note(text)


def _accelerator(facts: dict[str, Any]) -> str:
    words = f"{facts['name']}"
    if "memory" in facts:
        words += f" x {facts['devices']}, {facts.get('model') or 'unknown model'}, {memory(facts['memory'])} each"
    words += f"; {facts['backend']}" + (f" {facts['nccl']}" if "nccl" in facts else "")
    tf32 = {True: "yes", False: "no", None: "not on this device"}[facts["tf32"]]
    return words + f"; bf16 {'yes' if facts['bf16'] else 'no'}, TF32 {tf32}"


def notes(ranks: list[dict[str, Any]]) -> list[str]:
    """What works but will hurt later, each once, with the ranks it concerns."""
    found: dict[str, list[int]] = {}

    def add(text: str, rank: dict[str, Any]) -> None:
        found.setdefault(text, []).append(rank["rank"])

    hosts = {rank["host"] for rank in ranks}
    for rank in ranks:
        if rank["open_files"]["soft"] < FEW_FILES:
            add(f"{rank['open_files']['soft']} open files are few: raise them with `ulimit -n 65536`", rank)
        if rank["shared_memory"] is not None and rank["shared_memory"] < LITTLE_SHARED:
            add(
                f"/dev/shm has {memory(rank['shared_memory'])}, too little for loader processes: in a container use "
                "--shm-size or --ipc=host",
                rank,
            )
        if len(hosts) > 1 and str(rank["network"]["own_address"]).startswith("127.") and rank["rank"] != 0:
            add("the loopback device leads to MASTER_ADDR although rank 0 may be elsewhere", rank)
        if rank["network"]["own_address"] is None:
            add(f"no route to MASTER_ADDR {rank['network']['master']}", rank)
        settings = {k: v for k, v in rank["environment"].items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
        others = {k: v for k, v in ranks[0]["environment"].items() if k.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))}
        if settings != others:
            names = sorted(k for k in settings.keys() | others.keys() if settings.get(k) != others.get(k))
            add(f"{', '.join(names)} differ from rank 0's", rank)
    return [
        text if len(which) == len(ranks) else f"{text} (rank {first_of([str(r) for r in which], 4)})"
        for text, which in found.items()
    ]


def alike(ranks: list[dict[str, Any]]) -> Finding:
    """Versions, our own code and the kind of device must be the same everywhere."""
    if len(ranks) == 1:
        raise Skipped("one rank, nobody to compare with")
    wanted = _identity(ranks[0])
    for rank in ranks:
        for name, value in _identity(rank).items():
            if value != wanted[name]:
                text = f"rank {rank['rank']} on {rank['host']} has {name} {value}, rank 0 has {wanted[name]}"
                return Finding(text, False)
    return Finding(f"{len(wanted)} versions and devices, the same on all ranks", details=wanted)


def _identity(rank: dict[str, Any]) -> dict[str, Any]:
    device = rank["accelerator"]
    names = ("name", "backend", "model", "nccl", "bf16", "tf32")
    return {**rank["versions"], "code": rank["code"], **{f"accelerator {n}": device[n] for n in names if n in device}}


def own_devices(ranks: list[dict[str, Any]]) -> Finding:
    """Two ranks on one device are a mistake in the launch: half the memory, and NCCL refuses or hangs."""
    if ranks[0]["accelerator"]["name"] == "cpu":
        raise Skipped("CPU ranks have no devices")
    owner: dict[tuple[str, str], int] = {}
    for rank in ranks:
        device = (rank["host"], rank["accelerator"].get("uuid") or rank["accelerator"]["device"])
        if device in owner:
            return Finding(f"ranks {owner[device]} and {rank['rank']} use the same device on {rank['host']}", False)
        owner[device] = rank["rank"]
    return Finding(f"{len(owner)} ranks, {len(owner)} devices")
