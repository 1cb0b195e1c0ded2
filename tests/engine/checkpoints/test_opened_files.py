"""A rank that resumes opens only the files that hold its ranges; counted on two ranks, computed for 480."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from resumed_run import BATCH_NORM, settings
from tiny_run import merged, train_tiny

from engine.checkpoints import zero_folder
from engine.checkpoints.finding import find_checkpoint
from engine.checkpoints.manifest import NAME as MANIFEST
from engine.checkpoints.saved_geometry import NAME as GEOMETRY
from engine.checkpoints.saved_geometry import as_table, from_table
from engine.zero.geometry import Sharding

FROZEN = {"detector": {**BATCH_NORM["detector"], "frozen": ["backbone.conv1"]}}


def two_steps(stage: int, frozen: bool = True) -> dict:
    changes = settings("AdamW", stage, schedule={"steps": 2}, run={"checkpoint_interval": 2 / 3})
    return merged(FROZEN if frozen else BATCH_NORM, changes)


def saved_by(changes: dict) -> str:
    return f"{train_tiny(changes)['folder']}/checkpoints/step-000002"


@pytest.fixture(scope="module")
def saved(ranks):
    """The checkpoint of two ranks at a stage, made once."""
    made = {}

    def get(stage: int) -> Path:
        if stage not in made:
            made[stage] = ranks.run(saved_by, 2, two_steps(stage))[0]
        return Path(made[stage])

    return get


def opened(changes: dict, folder: str) -> list[str]:
    """The names of the files that this rank reads while it resumes."""
    from engine import distributed
    from engine.recipes.load import parse_config
    from engine.train.build import build_run
    from engine.train.work_dir import Resume

    work_dir = distributed.broadcast_object(f"{folder}-heir-{changes['zero_optimization']['stage']}")
    names, read = [], zero_folder.read_file
    zero_folder.read_file = lambda path: names.append(path.name) or read(path)
    try:
        run = build_run(parse_config(merged({"run": {"work_dir": work_dir}}, changes)), Resume(folder))
        run.engine.destroy()
    finally:
        zero_folder.read_file = read
    return sorted(names)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_ranks_open_their_own_files_and_the_common_ones(ranks, saved, stage):
    answers = ranks.run(opened, 2, two_steps(stage), str(saved(stage)))
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    for rank, names in enumerate(answers):
        own = [f"rank_{rank:05d}.pt", next(n for n in names if f"_rank_{rank}_mp_rank_00_optim_states.pt" in n)]
        parts = ["zero_pp_rank_1_mp_rank_00_model_states.pt"] if stage == 3 and rank == 0 else []  # frozen ones
        assert names == sorted([GEOMETRY, model, *own, *parts])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_table_says_what_the_files_of_all_ranks_say(saved, stage):
    checkpoint = find_checkpoint(saved(stage))
    for name, shape in checkpoint.parameters.items():
        assert checkpoint._places(name, 0, math.prod(shape)) == checkpoint._places_by_rank[name]
    older = find_checkpoint(without_table(saved(stage)))
    assert older._geometry is None and checkpoint._geometry is not None
    assert older.states == checkpoint.states and len(older.states) == 3
    older.check_shapes()
    first, second = dict(checkpoint.untrained()), dict(older.untrained())
    assert first.keys() == second.keys() and "backbone.conv1.weight" in first
    for name, value in second.items():
        assert first[name].dtype == value.dtype and torch.allclose(first[name], value, rtol=1e-6, atol=0)
    assert not torch.equal(*(checkpoint.statistics(rank)["backbone.bn1.running_mean"] for rank in (0, 1)))


def without_table(folder: Path) -> Path:
    """The checkpoint as an older version wrote it."""
    older = folder.with_name(f"{folder.name}-older")
    if not older.exists():
        shutil.copytree(folder, older)
        content = json.loads((older / MANIFEST).read_text())
        del content["sha256"], content["files"][GEOMETRY]
        (older / GEOMETRY).unlink()
        (older / MANIFEST).write_text(json.dumps(content))
    return older


def test_a_checkpoint_without_the_table_is_resumed_as_before(ranks, saved):
    names = ranks.run(opened, 2, two_steps(3), str(without_table(saved(3))))
    assert all({"rank_00000.pt", "rank_00001.pt"} <= set(found) for found in names)


def keepers(old: Sharding, new: Sharding, numels: list[int], groups: list[int], rank: int) -> set[int]:
    """The ranks of the saving run whose files hold what this rank of the new one needs."""
    saving = from_table(as_table(old.geometry(numels, groups)), old.world)
    return {
        place.rank
        for fragment in new.geometry(numels, groups, rank).held()
        for place in saving.places(fragment.param, fragment.start, fragment.stop)
    }


# The sizes of a detector of 1.1 billion: many small parameters, some of 50 million, in two param groups.
NUMELS = [7, 64, 1024, 9408, 65536, 2359296] * 60 + [50_000_001] * 20
GROUPS = [i % 2 for i in range(len(NUMELS))]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world, most", [(480, 1), (512, 8), (8, 480)])
def test_files_at_480_ranks(stage, world, most, record_property):
    old, new = Sharding(stage=stage, world=480), Sharding(stage=stage, world=world)
    order = sorted(range(len(NUMELS)), key=GROUPS.__getitem__)  # param groups lie one after the other
    numels, groups = [NUMELS[i] for i in order], [GROUPS[i] for i in order]
    counts = [len(keepers(old, new, numels, groups, rank)) for rank in {0, 1, world // 2, world - 1}]
    record_property("files", counts)
    print(f"ZeRO-{stage} 480 -> {world}: files of shards opened by a rank: {counts}")
    assert max(counts) <= most
    if world == 8:
        assert max(counts) <= (480 / 8 + 1) * (2 if stage < 3 else 8)
