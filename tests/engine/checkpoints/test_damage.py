"""Truncated, bit-flipped, missing, unfinished and hostile files: each is noticed, named and skipped."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from resumed_run import settings
from tiny_run import train_tiny

from engine.checkpoints import store
from engine.checkpoints.finding import find_checkpoint, newest
from engine.checkpoints.manifest import NAME, Manifest
from engine.errors import CheckpointError
from engine.zero.checked_files import checksum, read_file, write_file


@pytest.fixture(scope="module")
def saved(ranks):
    """A ZeRO-3 run with checkpoints at steps 3 and 6, two ranks."""
    return ranks.run(train_tiny, 2, settings("AdamW", 3))[0]["folder"]


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    "flipped": (flip, "another checksum"),
    "truncated": (truncate, "bytes instead of"),
    "missing": (Path.unlink, "is missing"),
    "emptied": (lambda path: path.write_bytes(b""), "0 bytes instead of"),
}


def files(folder: Path) -> list[str]:
    return sorted(Manifest.read(folder).files)


def test_a_checkpoint_names_all_its_files(saved):
    folder = Path(saved) / "checkpoints" / "step-000006"
    assert {path.name for path in folder.iterdir()} == {NAME, *files(folder)}
    assert {
        "rank_00000.pt",
        "rank_00001.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    } <= set(files(folder))
    assert all(checksum(folder / name) == record for name, record in Manifest.read(folder).files.items())
    assert find_checkpoint(saved).step == 6


@pytest.mark.parametrize("kind", DAMAGE)
def test_any_damaged_file_is_named_and_the_one_before_is_taken(copied, kind):
    harm, reason = DAMAGE[kind]
    folder = copied / "checkpoints" / "step-000006"
    shutil.copytree(folder, copied / "good")
    for name in files(folder):
        harm(folder / name)
        said = []
        found = newest(copied / "checkpoints", said.append)
        assert found.step == 3
        assert len(said) == 1 and "step-000006" in said[0] and name in said[0] and reason in said[0]
        with pytest.raises(CheckpointError, match=name):
            find_checkpoint(folder)
        shutil.copy(copied / "good" / name, folder / name)
    assert newest(copied / "checkpoints", print).step == 6


@pytest.mark.parametrize(
    "text, reason",
    [
        (None, "never finished"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"version": 99}', "format 99"),
    ],
)
def test_a_manifest_that_is_missing_or_broken_means_no_checkpoint(copied, text, reason):
    manifest = copied / "checkpoints" / "step-000006" / NAME
    manifest.unlink() if text is None else manifest.write_text(text)
    said = []
    assert newest(copied / "checkpoints", said.append).step == 3
    assert reason in said[0] and "step-000006" in said[0]


def test_without_a_whole_one_nothing_is_guessed(copied):
    for step in (3, 6):
        flip(copied / "checkpoints" / store.tag_of(step) / "rank_00001.pt")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole; the newest: .*step-000006.*rank_00001.pt"):
        find_checkpoint(copied)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(copied.parent)
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(copied / "nowhere")


def resume_damaged(folder: str) -> dict:
    return train_tiny(settings("AdamW", 3), work_dir=folder, resume="")


def test_a_run_goes_on_from_the_one_before_and_sets_the_damaged_one_aside(ranks, saved, copied):
    flip(copied / "checkpoints" / "step-000006" / "rank_00000.pt")
    outcome = ranks.run(resume_damaged, 2, str(copied))[0]
    assert "skipped: checkpoint" in outcome["printed"] and "rank_00000.pt has another checksum" in outcome["printed"]
    assert [r["step"] for r in outcome["records"]] == [1, 2, 3, 4, 5, 6]
    names = {path.name for path in (copied / "checkpoints").iterdir()}
    assert names == {"step-000003", "step-000006", "set-aside-step-000006", "latest"}
    again, first = find_checkpoint(copied), find_checkpoint(saved)
    for name in first.parameters:
        size = torch.Size(first.parameters[name]).numel()
        for state in ("fp32", "exp_avg", "exp_avg_sq", "ema"):
            assert torch.equal(first.read(name, state, 0, size), again.read(name, state, 0, size))


def manifest_of_an_attacker(folder: Path) -> dict:
    """The manifest's content without its checksum, as an older version wrote it: anybody can make one that fits."""
    content = json.loads((folder / NAME).read_text())
    del content["sha256"]
    return content


class Hostile:
    def __reduce__(self):
        return os.system, ("echo harm > harmed",)


@pytest.mark.parametrize(
    "name",
    [
        "geometry.pt",
        "rank_00000.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_a_hostile_pickle_is_refused_even_with_a_matching_checksum(copied, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copied / "checkpoints" / "step-000006"
    content = manifest_of_an_attacker(folder)
    content["files"][name] = list(write_file(folder / name, {"fragments": Hostile(), "module": Hostile()}))
    (folder / NAME).write_text(json.dumps(content))
    checkpoint = find_checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"{name}.*refused"):
        checkpoint.read(next(iter(checkpoint.parameters)), "fp32", 0, 1), checkpoint.meta, checkpoint.statistics(0)
    assert not (tmp_path / "harmed").exists()


def resume_hostile(folder: str) -> str:
    try:
        train_tiny(settings("AdamW", 3, schedule={"steps": 8}), resume=folder)
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # as the other rank hears it
        return str(error)
    return ""


def test_a_hostile_file_that_one_rank_alone_reads_stops_all(ranks, copied):
    folder, name = copied / "checkpoints" / "step-000006", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = manifest_of_an_attacker(folder)
    content["files"][name] = list(write_file(folder / name, {"optimizer_state_dict": Hostile()}))
    (folder / NAME).write_text(json.dumps(content))
    for text in ranks.run(resume_hostile, 2, str(folder), timeout=120):
        assert name in text and "refused" in text


def test_an_old_style_pickle_is_refused_too(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": Hostile()}))
    with pytest.raises(CheckpointError, match="x.pt"):
        read_file(tmp_path / "x.pt")


def test_only_whole_checkpoints_count_as_saved(tmp_path):
    for name in ("step-000001", ".saving-step-000002", ".removing-step-000003", "set-aside-step-000004", "step-5"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000009").write_text("no folder")
    assert store.saved_steps(tmp_path) == [1]
    aside = store.open_aside(tmp_path, store.tag_of(7))
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-000001",
        ".saving-step-000007",
        "set-aside-step-000004",
        "step-5",
        "step-000009",
    }
    store.make_current(tmp_path, aside, store.tag_of(7))
    assert store.saved_steps(tmp_path) == [1, 7] and (tmp_path / "latest").read_text() == "step-000007"


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step in range(1, 8):
        (tmp_path / store.tag_of(step)).mkdir()
    store.prune(tmp_path, keep_last=2, keep=3)
    assert store.saved_steps(tmp_path) == [3, 6, 7]
