"""A plan as text, JSON and picture: memory by stage with what fits, the recommended setting, time, scaling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.planning.hardware import Hardware
from engine.planning.memory import OFFLOADS, Memory
from engine.planning.model_facts import stage_refused
from engine.planning.plan import BACKBONE, Plan, Way
from engine.planning.time import StepTime, run_time, step_time

WORLDS = (8, 16, 32, 64, 128, 256, 512, 768, 1024)
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 10240)


class Choice(NamedTuple):
    """One way to run: its memory, and the step that it would take."""

    way: Way
    memory: Memory
    step: StepTime
    fits: bool
    own: bool  # what the config asks for


class Point(NamedTuple):
    """The run on another number of GPUs or at another batch size."""

    world: int
    batch: int
    column: int  # the batch that was asked for; `batch` is the nearest that the ranks can divide
    step: float
    images_per_second: float
    hours: float
    gpu_hours: float
    fits: bool

    @property
    def cell(self) -> str:
        batch = f"@{self.batch}" if self.batch != self.column else ""
        return f"{self.hours:.3g}{batch}{'' if self.fits else '*'}"


def choices(plan: Plan, hardware: Hardware) -> list[Choice]:
    """Stages 0 to 3 without and with recomputation, then offloading; what our optimizers refuse is left out."""
    pairs = [(stage, OFFLOADS[0]) for stage in range(4)] + [(2, OFFLOADS[1]), (3, OFFLOADS[1]), (3, OFFLOADS[2])]
    pairs = [(stage, offload) for stage, offload in pairs if not stage_refused(plan.config, stage)]
    found = []
    for stage, offload in dict.fromkeys([*pairs, plan.way[:2]]):
        for way in (Way(stage, offload, False), Way(stage, offload, True)):
            memory = plan.memory(way)
            fits = memory.peak <= hardware.usable()
            found.append(Choice(way, memory, step_time(plan, hardware, way), fits, own=way == plan.way))
    return found


def recommended(found: Iterable[Choice]) -> Choice | None:
    """The fastest that fits, offloading only where nothing else does; of those at most 2 % slower, the one that needs
    the least memory, and of equals the faster."""
    fitting = [choice for choice in found if choice.fits]
    fitting = [choice for choice in fitting if choice.way.offload == OFFLOADS[0]] or fitting
    if not fitting:
        return None
    fastest = min(choice.step.total for choice in fitting)
    return min((c for c in fitting if c.step.total <= 1.02 * fastest), key=lambda c: (c.memory.peak, c.step.total))


def scaling_points(plan: Plan, hardware: Hardware) -> list[Point]:
    """Every batch of BATCHES on every number of GPUs of WORLDS, and the plan's own of both, at its micro-batch. The run
    has the config's epochs at every batch, or as many images as its steps hold."""
    images = plan.steps * plan.batch.total
    fits: dict[tuple[int, bool], bool] = {}
    points = []
    for world in sorted({*WORLDS, plan.world}):
        for column, batch in divisible_batches({*BATCHES, plan.batch.total}, plan.batch.micro * world):
            other = plan.at(world, batch)
            key = (world, other.batch.accumulation > 1)  # memory depends on nothing else of the batch
            if key not in fits:
                fits[key] = other.memory().peak <= hardware.usable()
            steps = other.steps if plan.config.schedule.steps is None else max(1, round(images / batch))
            time = run_time(other, hardware)
            hours, speed = time.hours * steps / time.steps, time.images_per_second
            points.append(Point(world, batch, column, time.step.total, speed, hours, hours * world, fits[key]))
    return points


def divisible_batches(wanted: Iterable[int], unit: int) -> list[tuple[int, int]]:
    """The nearest multiple of `unit` to each wanted batch; a multiple that is nearest to several is listed once."""
    nearest: dict[int, int] = {}
    for column in sorted(wanted):
        batch = max(1, round(column / unit)) * unit
        other = nearest.get(batch, 0)
        if not other or max(column / batch, batch / column) < max(other / batch, batch / other):
            nearest[batch] = column
    return [(column, batch) for batch, column in sorted(nearest.items())]


def header(plan: Plan, hardware: Hardware) -> str:
    batch, mean, largest, trace = plan.batch, plan.sizes.mean, plan.sizes.largest, plan.trace(plan.sizes.mean)
    forward, backward = (count / trace.micro / 1e9 for count in trace.flops.values())
    nodes = -(-plan.world // hardware.gpus_per_node)
    return (
        f"plan    {plan.config.name} on {plan.world} x {hardware.name} ({nodes} nodes)\n"
        f"model   {plan.config.detector.config}, {plan.model.total / 1e6:.1f}M parameters, {plan.dtype}\n"
        f"data    {plan.data.train} training images ({plan.data.source}), {plan.steps_per_epoch} steps an epoch\n"
        f"batch   {batch.total} = {batch.micro} x {batch.accumulation} accumulated x {batch.world} ranks; "
        f"{plan.steps} steps\n"
        f"images  padded {mean.width} x {mean.height} in the mean, at most {largest.width} x {largest.height}\n"
        f"work    {forward:.0f} GFLOP forward and {backward:.0f} backward an image"
        f"{' (with what is recomputed)' if plan.way.recompute else ''}"
    )


class Report:
    """Memory and time of a plan in all ways that it could run."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self.plan, self.hardware = plan, hardware
        self.choices = choices(plan, hardware)
        self.best = recommended(self.choices)
        self.own = next(choice for choice in self.choices if choice.own)
        self.time = run_time(plan, hardware, self.own.step)

    def memory_table(self) -> str:
        card = self.hardware
        lines = [
            f"memory of a GPU in GB at the largest micro-batch ({card.name}: {card.usable() / 1e9:.1f} of "
            f"{card.memory / 1e9:.0f} GB for tensors); the peak is not the sum: parts are not all there at once",
            "  ZeRO offload    recompute  weights    grads   master  moments      EMA     AGVM  buckets gathered   "
            "activ.     peak   host  step s",
        ]
        for choice in self.choices:
            memory = choice.memory
            offload = dict(zip(OFFLOADS, ("-", "optimizer", "opt+param")))[choice.way.offload]
            cells = "".join(f"{part / 1e9:9.2f}" for part in memory.parts.values())
            lines.append(
                f"  {choice.way.stage:4d} {offload:10s} {'yes' if choice.way.recompute else 'no':>9s}{cells} "
                f"{memory.peak / 1e9:8.2f} {memory.host / 1e9:6.1f} {choice.step.total:7.2f}"
                f"{'' if choice.fits else '  does not fit'}{'  <- recommended' if choice is self.best else ''}"
                f"{'  <- this config' if choice.own else ''}"
            )
        return "\n".join(lines)

    def recommendation(self) -> str:
        plan, best = self.plan, self.best
        if best is None:
            return (
                f"nothing fits {self.hardware.name}: use smaller images (data.scale), a smaller micro-batch than "
                f"{plan.batch.micro}, more GPUs, or a larger card"
            )
        keys = ("offload_optimizer", "offload_param")[: OFFLOADS.index(best.way.offload)]
        zero = {"stage": best.way.stage, **{key: {"device": "cpu"} for key in keys}}
        names = (plan.config.detector.checkpoint_activations or BACKBONE) if best.way.recompute else []
        detector = json.dumps({"checkpoint_activations": names})
        return f'recommended: "zero_optimization": {json.dumps(zero)}, "detector": {detector}'

    def misfit_text(self) -> str:
        """Printed before the times of a config that does not fit."""
        text = (
            f"memory  THIS CONFIG DOES NOT FIT: it needs {self.own.memory.peak / 1e9:.1f} GB of the "
            f"{self.hardware.usable() / 1e9:.1f} that {self.hardware.name} has for tensors; its times below are those "
            "of a run that would stop"
        )
        if self.best is None:
            return text
        time = run_time(self.plan, self.hardware, self.best.step)
        return (
            f"{text}\n        the recommended setting: {time.step.total:.3f} s a step, {time.hours:.2f} hours, "
            f"{time.gpu_hours:.0f} GPU-hours"
        )

    def time_text(self) -> str:
        time, step = self.time, self.time.step
        evaluation = "evaluation not known (nor how many images it has)"
        if time.evaluation is not None:
            evaluation = f"evaluation {time.evaluation / 60:.1f} min (without scoring)"
        return (
            f"step    {step.total:.3f} s: forward {step.forward:.3f}, backward {step.backward:.3f}, exposed "
            f"communication {step.communication:.3f} (gradients {step.gradients:.3f}, weights {step.weights:.3f}, "
            f"batch-norm statistics {step.statistics:.3f}), optimizer {step.optimizer:.3f}, AGVM {step.window:.4f} "
            f"({step.window / step.total:.2%}); {step.sent / 1e6:.0f} MB sent by a GPU; at "
            f"{self.hardware.efficiency:.0%} of the card's peaks\n"
            f"run     {time.steps} steps in {time.hours:.2f} hours, {time.gpu_hours:.0f} GPU-hours, "
            f"{time.images_per_second:.0f} images/s; of it {evaluation}, checkpoints {time.checkpoints / 60:.1f} min"
        )

    def as_json(self, points: Sequence[Point]) -> dict[str, Any]:
        plan, time, step, best, sizes = self.plan, self.time, self.time.step, self.best, self.plan.sizes
        trace = plan.trace(sizes.mean)
        return {
            **dict(config=plan.config.name, hardware=self.hardware.__dict__, world=plan.world),
            **dict(batch=plan.batch.as_keys(), steps=plan.steps, memory=[self._row(choice) for choice in self.choices]),
            **dict(recommended=best and self._row(best), step=step._asdict(), step_seconds=step.total),
            **dict(hours=time.hours, gpu_hours=time.gpu_hours, images_per_second=time.images_per_second),
            **dict(evaluation_seconds=time.evaluation, checkpoint_seconds=time.checkpoints),
            **{f"{name}_flops_per_image": count / trace.micro for name, count in trace.flops.items()},
            **dict(mean_image_size=sizes.mean._asdict(), largest_image_size=sizes.largest._asdict()),
            "scaling": [point._asdict() for point in points],
        }

    def _row(self, choice: Choice) -> dict[str, Any]:
        memory, hours = choice.memory, run_time(self.plan, self.hardware, choice.step).hours
        return {
            **choice.way._asdict(),
            **dict(peak_bytes=memory.peak, host_bytes=memory.host, parts=memory.parts, phases=memory.phases),
            **dict(step_seconds=choice.step.total, fits=choice.fits, own=choice.own, hours=hours),
        }


def scaling_table(points: Sequence[Point]) -> str:
    """Hours by GPUs (down) and batch (across), and images a second with one micro-batch for each rank."""
    columns = sorted({point.column for point in points})
    text = ["hours by GPUs and batch size (right: images/s, and its share of linear, at the smallest batch of the row)"]
    if any(point.batch != point.column for point in points):
        text.append("  HOURS@BATCH: at the nearest batch that the ranks can divide among them")
    if not all(point.fits for point in points):
        text.append("  * does not fit the card with this config's settings")
    width = 2 + max(5, *(len(point.cell) for point in points))
    text.append("  GPUs " + "".join(f"{column:>{width}}" for column in columns) + "     img/s  linear")
    for world in sorted({point.world for point in points}):
        row = {point.column: point for point in points if point.world == world}
        cells = "".join(f"{row[column].cell if column in row else '':>{width}}" for column in columns)
        speed = row[min(row)].images_per_second
        linear = speed / world / (points[0].images_per_second / points[0].world)
        text.append(f"{world:6d} {cells} {speed:9.0f} {linear:7.0%}")
    return "\n".join(text)


def draw_scaling(points: Sequence[Point], path: Path, title: str) -> None:
    # Imported here because it takes a second, and most plans draw nothing.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after the choice of a backend without a screen

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    columns = sorted({point.column for point in points})
    for place, column in enumerate(columns):
        line = [point for point in points if point.column == column]
        label = f"batch {'about ' if any(point.batch != column for point in line) else ''}{column}"
        style: dict[str, Any] = dict(markersize=3, label=label, color=plt.cm.viridis(place / len(columns)))
        left.plot([p.world for p in line], [p.hours for p in line], "o-", **style)
    worlds = sorted({point.world for point in points})
    best = [max((p for p in points if p.world == world), key=lambda p: p.images_per_second) for world in worlds]
    first = best[0].images_per_second / best[0].world
    right.plot(worlds, [p.images_per_second for p in best], "o-", markersize=3, label="planned")
    right.plot(worlds, [first * world for world in worlds], ":", color="grey", label="linear")
    labelled: list[int] = []
    for world in worlds:
        if not labelled or world >= 1.25 * labelled[-1]:  # 480 beside 512 could not be read
            labelled.append(world)
    titles = (
        (left, points, "hours", "hours"),
        (right, best, "images_per_second", "images a second, at the best batch"),
    )
    for axes, members, value, name in titles:
        misfits = [p for p in members if not p.fits]
        if misfits:
            values = [getattr(p, value) for p in misfits]
            axes.plot([p.world for p in misfits], values, "x", color="red", label="does not fit")
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=name)
        axes.set_xticks(labelled, [str(world) for world in labelled], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
