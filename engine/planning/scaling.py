"""The same run on other numbers of GPUs and at other batch sizes: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config import ConfigError
from engine.planning.hardware import Hardware
from engine.planning.plan import Plan
from engine.planning.time import run_time

WORLDS = (8, 16, 32, 64, 128, 256, 512, 768, 1024)
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 10240)


class Point(NamedTuple):
    world: int
    batch: int
    step: float
    images_per_second: float
    hours: float
    gpu_hours: float


def scaling_points(plan: Plan, hardware: Hardware) -> list[Point]:
    """Every batch of BATCHES on every number of GPUs that it can be divided among at the config's micro-batch.

    The length of the run follows the config: its epochs at every batch, or as many images as its steps hold.
    """
    images = plan.steps * plan.batch.total
    points = []
    for world in WORLDS:
        for batch in BATCHES:
            try:
                other = plan.at(world, batch)
            except ConfigError:
                continue
            steps = other.steps if plan.config.schedule.steps is None else max(1, round(images / batch))
            time = run_time(other, hardware)
            hours = time.hours * steps / time.steps
            points.append(Point(world, batch, time.step.total, time.images_per_second, hours, hours * world))
    return points


def scaling_table(points: list[Point]) -> str:
    """Hours by GPUs (down) and batch (across), and images a second with one micro-batch for each rank."""
    batches = sorted({point.batch for point in points})
    by_place = {(point.world, point.batch): point for point in points}
    lines = ["hours by GPUs and batch size (right: images/s, and its share of linear, at the smallest batch of the row)",
             "  GPUs " + "".join(f"{batch:>9}" for batch in batches) + "     img/s  linear"]
    first = None
    for world in sorted({point.world for point in points}):
        row = [by_place.get((world, batch)) for batch in batches]
        smallest = next(point for point in row if point is not None)
        first = first or smallest
        cells = "".join(f"{'' if point is None else f'{point.hours:.3g}':>9}" for point in row)
        linear = smallest.images_per_second / world / (first.images_per_second / first.world)
        lines.append(f"{world:6d} {cells} {smallest.images_per_second:9.0f} {linear:7.0%}")
    return "\n".join(lines)


def draw_scaling(points: list[Point], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    batches = sorted({point.batch for point in points})
    for place, batch in enumerate(batches):
        line = [point for point in points if point.batch == batch]
        left.plot([p.world for p in line], [p.hours for p in line], "o-", markersize=3, label=f"batch {batch}",
                  color=plt.cm.viridis(place / len(batches)))
    best = [max((p for p in points if p.world == world), key=lambda p: p.images_per_second)
            for world in sorted({point.world for point in points})]
    right.plot([p.world for p in best], [p.images_per_second for p in best], "o-", markersize=3, label="planned")
    right.plot([p.world for p in best], [p.world * best[0].images_per_second / best[0].world for p in best], ":",
               color="grey", label="linear")
    for axes, name in ((left, "hours"), (right, "images a second, at the best batch")):
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=name)
        axes.set_xticks([p.world for p in best], [str(p.world) for p in best])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
