"""The lines of a dry run: shards by module, collectives by purpose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from engine.files import write_json
from engine.planning.settings import WindowSettings
from engine.planning.shards import PlannedShards
from engine.planning.traffic import Collective, sent_bytes, times
from engine.zero.settings import CommunicationSettings

_MASTER = 4  # bytes of an fp32 weight
_KINDS = {
    0: "all of it on every rank",
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "weights, gradients and optimizer state",
}


def size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def say_layout(layout: PlannedShards, settings: CommunicationSettings) -> None:
    ranks = f"of {layout.geometry.world} ranks" if settings.stage else f"on all of {layout.geometry.world} ranks"
    print(
        f"shards  ZeRO-{settings.stage}: {_KINDS[settings.stage]}; fp32 bytes {ranks}, {size(_MASTER * layout.geometry.padding())} "
        "of padding in all"
    )
    print(f"  {'module':<22}{'in all':>11}{'least':>11}{'mean':>11}{'most':>11}{'empty ranks':>13}")
    for share in layout.module_shares():
        cells = [size(_MASTER * value) for value in (share.numel, share.least, share.mean, share.greatest)]
        print(f"  {share.module:<22}" + "".join(f"{cell:>11}" for cell in cells) + f"{share.empty:>13}")


def write_layout(layout: PlannedShards, settings: CommunicationSettings, path: Path) -> None:
    """How many elements of every module each rank holds, in the order of the ranks, as JSON."""
    write_json(
        path,
        dict(
            stage=settings.stage,
            world=layout.geometry.world,
            holds=_KINDS[settings.stage],
            elements=layout.held_elements(),
        ),
    )
    print(f"layout  of {layout.geometry.world} ranks written to {path}")


def say_traffic(
    collectives: Sequence[Collective], settings: CommunicationSettings, window: WindowSettings | None
) -> None:
    if settings.world == 1:
        print("traffic none on one rank")
        return
    plain = [c for c in collectives if "window" not in c.when]
    print(
        f"traffic of a plain step (payload of all calls, and what a rank sends in a ring); {settings.communication_dtype} "
        "gradients"
    )
    _say(plain, settings)
    if window is not None:
        print(f"traffic that an AGVM window adds ({window.kind})")
        _say([c for c in collectives if c.when == "window"], settings)
        first = sum(
            times(c, settings.accumulation, first=True) * c.bytes for c in collectives if c.when == "first window"
        )
        print(f"  the first window sends {size(first)} more to check itself")


def _say(collectives: Sequence[Collective], settings: CommunicationSettings) -> None:
    lines: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for c in collectives:
        calls = times(c, settings.accumulation, window=True)
        line = lines[c.purpose, c.op]
        line[0] += calls
        line[1] += calls * c.bytes
        line[2] += calls * sent_bytes(c.op, c.bytes, settings.world)
    print(f"  {'what':<22}{'collective':<16}{'calls':>7}{'payload':>12}{'sent':>12}{'bytes':>16}")
    for (purpose, op), (calls, payload, sent) in lines.items():
        print(f"  {purpose:<22}{op:<16}{calls:>7}{size(payload):>12}{size(sent):>12}{payload:>16}")
    total = [sum(line[k] for line in lines.values()) for k in range(3)]
    print(f"  {'in all':<38}{total[0]:>7}{size(total[1]):>12}{size(total[2]):>12}{total[1]:>16}", flush=True)
