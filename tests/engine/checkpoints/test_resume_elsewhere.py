"""Resume on another number of ranks, at another ZeRO stage or micro-batch: the same run up to rounding."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from resumed_run import go_on, settings
from tiny_run import distance, merged, train_tiny

from engine.checkpoints.finding import find_checkpoint

STOP, STEPS = 4, 6
# (ranks, stage) that save, (ranks, stage) that go on
MOVES = [
    ((2, 2), (1, 2)),
    ((1, 2), (2, 2)),
    ((2, 2), (4, 2)),
    ((2, 2), (2, 3)),
    ((2, 3), (2, 2)),
    ((4, 3), (2, 1)),
    ((2, 0), (4, 3)),
    ((2, 3), (1, 0)),
    ((2, 1), (2, 0)),
]
# Rounding alone: another number of ranks adds gradients in another order.
FEWER = MOVES[:4]  # for the other optimizers, whose shards lie alike
OPTIMIZERS = ("SGD", "AGVMSGD", "AdamW", "AGVMAdamW")


def greatest(first: dict, second: dict) -> float:
    """The greatest difference, relative to the greatest weight of its tensor, or to 0.001 if that is smaller."""
    return max(float((first[n] - second[n]).abs().max() / first[n].abs().max().clamp(min=1e-3)) for n in first)


def longer(optimizer: str, stage: int) -> dict:
    return settings(optimizer, stage, schedule={"steps": STEPS})


def whole_and_part(changes: dict) -> tuple[dict, str]:
    """An undisturbed run, and its checkpoint of step STOP, which lies within an epoch of three steps."""
    straight = train_tiny(merged({"run": {"checkpoint_interval": STOP / 3}}, changes))
    return straight, f"{straight['folder']}/checkpoints/step-{STOP:06d}"


@pytest.fixture(scope="module")
def saved(ranks):
    """Undisturbed runs and checkpoints of them, made once for all moves."""
    made = {}

    def get(optimizer: str, world: int, stage: int) -> tuple[dict, str]:
        key = (optimizer, world, stage)
        if key not in made:
            made[key] = ranks.run(whole_and_part, world, longer(optimizer, stage))[0]
        return made[key]

    return get


# AGVMAdamW keeps the moments of plain AdamW, and more.
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[] if name == "AGVMAdamW" else pytest.mark.exhaustive) for name in OPTIMIZERS],
)
def test_other_ranks_and_stages_go_on_as_the_undisturbed_run(ranks, saved, optimizer, record_property):
    for (world, stage), (new_world, new_stage) in MOVES if optimizer == "AGVMAdamW" else FEWER:
        straight, folder = saved(optimizer, world, stage)
        moved = ranks.run(go_on, new_world, longer(optimizer, new_stage), folder)[0]
        apart, total = greatest(straight["weights"], moved["weights"]), distance(straight["weights"], moved["weights"])
        print(
            f"{optimizer:10} {world} ranks ZeRO-{stage} -> {new_world} ranks ZeRO-{new_stage}: greatest {apart:.1e}, "
            f"all together {total:.1e}"
        )
        record_property(f"{world} ZeRO-{stage} -> {new_world} ZeRO-{new_stage}", apart)
        assert apart < 5e-6 and total < 1e-7
        assert [r["step"] for r in moved["records"]] == list(range(1, STEPS + 1))
        assert moved["mu"] == pytest.approx(straight["mu"], rel=1e-4)
        for ours, theirs in zip(moved["records"], straight["records"]):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4) and ours["lr"] == theirs["lr"]


@pytest.mark.parametrize(
    "optimizer, saver, heir",
    [
        ("LARS", (2, 3), (1, 2)),
        ("LAMB", (2, 2), (4, 3)),
        ("PMDLAMB", (2, 1), (1, 0)),
        ("AGVMLARS", (2, 0), (4, 2)),
        ("AGVMLAMB", (2, 2), (1, 3)),
    ],
)
def test_rules_of_layers_go_on_elsewhere(ranks, saved, optimizer, saver, heir):
    """Their shards are cut in other places there, PMD-LAMB goes on within its period, and AGVM with its mu."""
    straight, folder = saved(optimizer, *saver)
    moved = ranks.run(go_on, heir[0], longer(optimizer, heir[1]), folder)[0]
    apart, total = greatest(straight["weights"], moved["weights"]), distance(straight["weights"], moved["weights"])
    print(f"{optimizer:10} {saver} -> {heir}: greatest {apart:.1e}, all together {total:.1e}")
    assert apart < 5e-6 and total < 1e-7
    assert moved["mu"] == pytest.approx(straight["mu"], rel=1e-4)


def test_another_micro_batch_goes_on_with_the_same_global_batches_and_leaves_the_first_folder_alone(ranks, saved):
    straight, checkpoint = saved("SGD", 2, 2)
    moved = ranks.run(go_on, 2, merged({"train_micro_batch_size_per_gpu": 2}, longer("SGD", 2)), checkpoint)[0]
    assert "train_micro_batch_size_per_gpu: 1 -> 2" in moved["printed"]
    # A detector's loss is a mean over the objects of a micro-batch, so the run is a like one, not the same.
    assert 1e-6 < distance(straight["weights"], moved["weights"]) < 0.05
    for ours, theirs in zip(moved["records"], straight["records"]):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.3) and ours["lr"] == theirs["lr"]
    folder = Path(straight["folder"])
    assert sorted(path.name for path in folder.rglob("*")) == straight["files"]
    assert (folder / "checkpoints" / "latest").read_text() == f"step-{STEPS:06d}"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == list(range(1, STEPS + 1))


def moments(folder: str) -> tuple[dict, dict, dict]:
    checkpoint = find_checkpoint(folder)
    names = list(checkpoint.parameters)
    size = {name: checkpoint.read(name, "fp32", 0, 1).new_zeros(checkpoint.parameters[name]).numel() for name in names}
    tensors = {
        (name, state): checkpoint.read(name, state, 0, size[name]).clone()
        for name in names
        for state in ("fp32", *checkpoint.states)
    }
    return tensors, {name: checkpoint.scalars(name) for name in names}, checkpoint.agvm


def resave(changes: dict, folder: str) -> tuple[str, list[dict]]:
    """Load a checkpoint and save it again without a step in between; the new folder, and the optimizer's groups."""
    from engine import distributed
    from engine.checkpoints.saving import save_checkpoint
    from engine.recipes.load import parse_config
    from engine.train.build import build_run
    from engine.train.work_dir import Resume

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    run = build_run(parse_config(merged({"run": {"work_dir": work_dir}}, changes)), Resume(folder))
    save_checkpoint(run.state(), run.work_dir, run.start)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    run.engine.destroy()
    return work_dir, groups


# AGVMAdamW keeps the moments of plain AdamW, and more.
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[] if name == "AGVMAdamW" else pytest.mark.exhaustive) for name in OPTIMIZERS],
)
def test_every_moment_counter_and_group_arrives_bit_for_bit(ranks, saved, optimizer):
    _, folder = saved(optimizer, 2, 2)
    first = moments(folder)
    groups = []
    for world, stage in ((1, 3), (4, 1), (2, 0)):
        copied, found = ranks.run(resave, world, longer(optimizer, stage), folder)[0]
        second = moments(copied)
        assert first[0].keys() == second[0].keys() and all(first[0][k].equal(second[0][k]) for k in first[0])
        assert {n: int(s["step"]) for n, s in first[1].items() if "step" in s} == {
            n: int(s["step"]) for n, s in second[1].items() if "step" in s
        }
        assert first[2] == second[2]
        groups.append(json.dumps(found))
    assert "Adam" not in optimizer or first[1][next(iter(first[1]))]["step"] == STOP
    # Group names, base learning rates and decay come from the config, alike at all stages.
    assert len(set(groups)) == 1 and '"module"' in groups[0] and '"base_lr"' in groups[0]


def test_agvm_keeps_its_micro_batch(ranks, saved):
    _, folder = saved("AGVMSGD", 2, 2)
    with pytest.raises(AssertionError, match="train_micro_batch_size_per_gpu: 1 -> 2"):
        ranks.run(go_on, 2, merged({"train_micro_batch_size_per_gpu": 2}, longer("AGVMSGD", 2)), folder)
