"""A plan as text and as JSON: memory by stage with what fits, the recommended setting, time, scaling."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.planning.hardware import Hardware
from engine.planning.memory import OFFLOADS, Memory
from engine.planning.plan import Plan
from engine.planning.settings import stage_refused
from engine.planning.time import RunTime, StepTime, run_time, step_time

_PARTS = (
    "weights",
    "gradients",
    "master weights",
    "moments",
    "average",
    "AGVM window",
    "buckets",
    "gathered weights",
    "activations",
)
_SHORT = ("weights", "grads", "master", "moments", "EMA", "AGVM", "buckets", "gathered", "activ.")


class Choice(NamedTuple):
    """One way to run: its memory, and the step that it would take."""

    memory: Memory
    recompute: bool
    step: StepTime
    fits: bool
    own: bool  # what the config asks for


def choices(plan: Plan, hardware: Hardware) -> list[Choice]:
    """Stages 0 to 3 without and with recomputation, then offloading; what our optimizers refuse is left out."""
    ways = [(stage, OFFLOADS[0]) for stage in range(4)] + [(2, OFFLOADS[1]), (3, OFFLOADS[1]), (3, OFFLOADS[2])]
    ways = [(stage, offload) for stage, offload in ways if not stage_refused(plan.config, stage)]
    mine = (plan.stage, plan.offload)
    found = []
    for stage, offload in ways if mine in ways else [*ways, mine]:
        for recompute in (False, True):
            memory = plan.memory(stage, offload=offload, recompute=recompute)
            step = step_time(plan, hardware, stage=stage, recompute=recompute, offload=offload)
            found.append(
                Choice(
                    memory,
                    recompute,
                    step,
                    memory.peak <= hardware.usable(),
                    (stage, offload, recompute) == (*mine, plan.recomputed),
                )
            )
    return found


def recommended(found: list[Choice]) -> Choice | None:
    """The fastest that fits, offloading only where nothing else does; of those within two hundredths of it, the one that
    needs the least memory, and of equals the faster."""
    fitting = [choice for choice in found if choice.fits]
    fitting = [choice for choice in fitting if choice.memory.offload == OFFLOADS[0]] or fitting
    if not fitting:
        return None
    fastest = min(choice.step.total for choice in fitting)
    return min((c for c in fitting if c.step.total <= 1.02 * fastest), key=lambda c: (c.memory.peak, c.step.total))


def memory_table(found: list[Choice], hardware: Hardware, best: Choice | None) -> str:
    lines = [
        f"memory of a GPU in GB at the largest micro-batch ({hardware.name}: {hardware.usable() / 1e9:.1f} of "
        f"{hardware.memory / 1e9:.0f} GB for tensors); the peak is not the sum: parts are not all there at once",
        "  ZeRO offload    recompute" + "".join(f"{name:>9}" for name in _SHORT) + "     peak   host  step s",
    ]
    for choice in found:
        memory = choice.memory
        offload = {"none": "-", "optimizer": "optimizer", "optimizer+parameters": "opt+param"}[memory.offload]
        cells = "".join(f"{memory.parts[part] / 1e9:9.2f}" for part in _PARTS)
        marks = [
            mark
            for mark, there in (
                ("does not fit", not choice.fits),
                ("<- recommended", choice is best),
                ("<- this config", choice.own),
            )
            if there
        ]
        lines.append(
            f"  {memory.stage:4d} {offload:10s} {'yes' if choice.recompute else 'no':>9s}{cells} "
            f"{memory.peak / 1e9:8.2f} {memory.host / 1e9:6.1f} {choice.step.total:7.2f}{''.join(f'  {mark}' for mark in marks)}"
        )
    return "\n".join(lines)


def recommendation(plan: Plan, hardware: Hardware, best: Choice | None) -> str:
    if best is None:
        return (
            f"nothing fits {hardware.name}: use smaller images (data.scale), a smaller micro-batch than "
            f"{plan.batch.micro}, more GPUs, or a larger card"
        )
    zero = f'"zero_optimization": {{"stage": {best.memory.stage}'
    if best.memory.offload != OFFLOADS[0]:
        zero += ', "offload_optimizer": {"device": "cpu"}'
    if best.memory.offload == OFFLOADS[2]:
        zero += ', "offload_param": {"device": "cpu"}'
    names = plan.config.detector.checkpoint_activations or ["backbone"]
    shown = ", ".join(f'"{name}"' for name in names) if best.recompute else ""
    return f'recommended: {zero}}}, "detector": {{"checkpoint_activations": [{shown}]}}'


def misfit_text(plan: Plan, hardware: Hardware, own: Choice, best: Choice | None) -> str:
    """What stands before the times of a config that does not fit."""
    text = (
        f"memory  THIS CONFIG DOES NOT FIT: it needs {own.memory.peak / 1e9:.1f} GB of the {hardware.usable() / 1e9:.1f} that "
        f"{hardware.name} has for tensors; its times below are those of a run that would stop"
    )
    if best is None:
        return text
    time = run_time(plan, hardware, best.step)
    return (
        f"{text}\n        the recommended setting: {time.step.total:.3f} s a step, {time.hours:.2f} hours, "
        f"{time.gpu_hours:.0f} GPU-hours"
    )


def header(plan: Plan, hardware: Hardware) -> str:
    batch, sizes = plan.batch, plan.sizes
    trace = plan.trace(sizes.mean)
    total = sum(p.numel for p in plan.parameters)
    return "\n".join(
        [
            f"plan    {plan.config.name} on {plan.world} x {hardware.name} ({-(-plan.world // hardware.gpus_per_node)} nodes)",
            f"model   {plan.config.detector.config}, {total / 1e6:.1f}M parameters, {plan.dtype}",
            f"data    {plan.data.train} training images ({plan.data.source}), {plan.steps_per_epoch} steps an epoch",
            f"batch   {batch.total} = {batch.micro} x {batch.accumulation} accumulated x {batch.world} ranks; {plan.steps} steps",
            f"images  padded {sizes.mean.width} x {sizes.mean.height} in the mean, at most {sizes.largest.width} x "
            f"{sizes.largest.height}",
            f"work    {trace.forward_flops / trace.micro / 1e9:.0f} GFLOP forward and {trace.backward_flops / trace.micro / 1e9:.0f} "
            f"backward an image{' (with what is recomputed)' if plan.recomputed else ''}",
        ]
    )


def time_text(time: RunTime, hardware: Hardware) -> str:
    step = time.step
    evaluation = (
        "evaluation not known (nor how many images it has)"
        if time.evaluation is None
        else f"evaluation {time.evaluation / 60:.1f} min (without scoring)"
    )
    return "\n".join(
        [
            f"step    {step.total:.3f} s: forward {step.forward:.3f}, backward {step.backward:.3f}, exposed communication "
            f"{step.communication:.3f} (gradients {step.gradients:.3f}, weights {step.weights:.3f}, batch-norm statistics "
            f"{step.statistics:.3f}), optimizer {step.optimizer:.3f}, AGVM {step.window:.4f} ({step.window / step.total:.2%}); "
            f"{step.sent / 1e6:.0f} MB sent by a GPU; at {hardware.efficiency:.0%} of the card's peaks",
            f"run     {time.steps} steps in {time.hours:.2f} hours, {time.gpu_hours:.0f} GPU-hours, {time.images_per_second:.0f} "
            f"images/s; of it {evaluation}, checkpoints {time.checkpoints / 60:.1f} min",
        ]
    )


def as_json(
    plan: Plan, hardware: Hardware, found: list[Choice], best: Choice | None, time: RunTime, points: list[Any]
) -> dict[str, Any]:
    def row(choice: Choice) -> dict[str, Any]:
        memory = choice.memory
        return dict(
            stage=memory.stage,
            offload=memory.offload,
            recompute=choice.recompute,
            peak_bytes=memory.peak,
            host_bytes=memory.host,
            parts=memory.parts,
            phases=memory.phases,
            step_seconds=choice.step.total,
            fits=choice.fits,
            own=choice.own,
            hours=run_time(plan, hardware, choice.step).hours,
        )

    trace, sizes = plan.trace(plan.sizes.mean), plan.sizes

    return dict(
        config=plan.config.name,
        hardware=hardware.__dict__,
        world=plan.world,
        batch=plan.batch.as_keys(),
        steps=plan.steps,
        memory=[row(choice) for choice in found],
        recommended=None if best is None else row(best),
        step=time.step.__dict__,
        step_seconds=time.step.total,
        hours=time.hours,
        gpu_hours=time.gpu_hours,
        images_per_second=time.images_per_second,
        evaluation_seconds=time.evaluation,
        checkpoint_seconds=time.checkpoints,
        forward_flops_per_image=trace.forward_flops / trace.micro,
        backward_flops_per_image=trace.backward_flops / trace.micro,
        mean_image_size=sizes.mean._asdict(),
        largest_image_size=sizes.largest._asdict(),
        scaling=[point._asdict() for point in points],
    )
