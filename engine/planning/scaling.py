"""The same run on other numbers of GPUs and at other batch sizes: a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from engine.planning.hardware import Hardware
from engine.planning.plan import Plan
from engine.planning.time import run_time

WORLDS = (8, 16, 32, 64, 128, 256, 512, 768, 1024)
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 10240)


class Point(NamedTuple):
    world: int
    batch: int
    column: int  # the batch that was asked for, of which `batch` is what the ranks can divide among them
    step: float
    images_per_second: float
    hours: float
    gpu_hours: float
    fits: bool


def scaling_points(plan: Plan, hardware: Hardware) -> list[Point]:
    """Every batch of BATCHES on every number of GPUs of WORLDS, and the plan's own of both, at the config's micro-batch.

    The length of the run follows the config: its epochs at every batch, or as many images as its steps hold.
    """
    images = plan.steps * plan.batch.total
    fits: dict[tuple[int, bool], bool] = {}
    points = []
    for world in sorted({*WORLDS, plan.world}):
        for column, batch in divisible_batches({*BATCHES, plan.batch.total}, plan.batch.micro * world):
            other = plan.at(world, batch)
            key = (world, other.batch.accumulation > 1)  # of the batch, memory depends on no more than that
            if key not in fits:
                fits[key] = other.memory().peak <= hardware.usable()
            steps = other.steps if plan.config.schedule.steps is None else max(1, round(images / batch))
            time = run_time(other, hardware)
            hours = time.hours * steps / time.steps
            points.append(
                Point(world, batch, column, time.step.total, time.images_per_second, hours, hours * world, fits[key])
            )
    return points


def divisible_batches(wanted: Iterable[int], unit: int) -> list[tuple[int, int]]:
    """The nearest multiple of `unit` to each batch that is wanted; where several have the same, it goes to the nearest."""
    nearest: dict[int, int] = {}
    for column in sorted(wanted):
        batch = max(1, round(column / unit)) * unit
        if batch not in nearest or _apart(column, batch) < _apart(nearest[batch], batch):
            nearest[batch] = column
    return [(column, batch) for batch, column in sorted(nearest.items())]


def _apart(first: int, second: int) -> float:
    return max(first / second, second / first)


def scaling_table(points: list[Point]) -> str:
    """Hours by GPUs (down) and batch (across), and images a second with one micro-batch for each rank."""
    columns = sorted({point.column for point in points})
    by_place = {(point.world, point.column): point for point in points}
    lines = [
        "hours by GPUs and batch size (right: images/s, and its share of linear, at the smallest batch of the row)"
    ]
    if any(point.batch != point.column for point in points):
        lines.append("  HOURS@BATCH: at the nearest batch that the ranks can divide among them")
    if not all(point.fits for point in points):
        lines.append("  * does not fit the card with this config's settings")
    width = 2 + max(5, *(len(_cell(point)) for point in points))
    lines.append("  GPUs " + "".join(f"{column:>{width}}" for column in columns) + "     img/s  linear")
    first = None
    for world in sorted({point.world for point in points}):
        row = [by_place.get((world, column)) for column in columns]
        smallest = next(point for point in row if point is not None)
        first = first or smallest
        cells = "".join(f"{_cell(point):>{width}}" for point in row)
        linear = smallest.images_per_second / world / (first.images_per_second / first.world)
        lines.append(f"{world:6d} {cells} {smallest.images_per_second:9.0f} {linear:7.0%}")
    return "\n".join(lines)


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    return f"{point.hours:.3g}{f'@{point.batch}' if point.batch != point.column else ''}{'' if point.fits else '*'}"


def draw_scaling(points: list[Point], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    columns = sorted({point.column for point in points})
    for place, column in enumerate(columns):
        line = [point for point in points if point.column == column]
        about = "about " if any(point.batch != column for point in line) else ""
        left.plot(
            [p.world for p in line],
            [p.hours for p in line],
            "o-",
            markersize=3,
            label=f"batch {about}{column}",
            color=plt.cm.viridis(place / len(columns)),
        )
    best = [
        max((p for p in points if p.world == world), key=lambda p: p.images_per_second)
        for world in sorted({point.world for point in points})
    ]
    right.plot([p.world for p in best], [p.images_per_second for p in best], "o-", markersize=3, label="planned")
    right.plot(
        [p.world for p in best],
        [p.world * best[0].images_per_second / best[0].world for p in best],
        ":",
        color="grey",
        label="linear",
    )
    for axes, members, value in ((left, points, "hours"), (right, best, "images_per_second")):
        misfits = [p for p in members if not p.fits]
        if misfits:
            axes.plot(
                [p.world for p in misfits], [getattr(p, value) for p in misfits], "x", color="red", label="does not fit"
            )
    labelled: list[int] = []
    for point in best:
        if not labelled or point.world >= 1.25 * labelled[-1]:  # 480 beside 512 could not be read
            labelled.append(point.world)
    for axes, name in ((left, "hours"), (right, "images a second, at the best batch")):
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=name)
        axes.set_xticks(labelled, [str(world) for world in labelled], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
