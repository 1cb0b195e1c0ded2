"""Hundreds of faulty annotation files: each is refused in one sentence, or read exactly as its cleaned file."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from annotation_mutants import FILE_FAULTS, OBJECT_FAULTS, SPLITS, TASKS, mutants, sound_content, write_images

from engine.config.schema import DataConfig, SplitConfig
from engine.data.build import build_data
from engine.errors import DataError
from engine.tasks.coco_scores import ground_truth

SEED = 20
USUAL, EXHAUSTIVE = 400, 6000
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 on numpy 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mutants")
    (path / "images").mkdir()
    write_images(path / "images")
    (path / "sound.json").write_text(json.dumps(sound_content()))
    return path


def read(folder, split, task, text):
    """What is trained on and what is scored with if a split has this text, and the other one is sound."""
    (folder / "split.json").write_text(text, encoding="utf-8")
    files = {
        name: SplitConfig(
            annotations=str(folder / ("split.json" if name == split else "sound.json")), images=str(folder / "images")
        )
        for name in SPLITS
    }
    train, val, classes = build_data(DataConfig(**files, task=task, scale=[64, 64], workers=0))
    samples = [
        {key: info[key] for key in ("img_id", "img_path", "height", "width", "instances")}
        for info in (train.dataset.get_data_info(index) for index in range(len(train.dataset)))
    ]
    if task == "detection":  # masks are then neither read nor shown
        for sample in samples:
            for instance in sample["instances"]:
                instance.pop("mask", None)
    images = [val.dataset.get_data_info(index)["img_id"] for index in range(len(val.dataset))]
    return samples, ground_truth(val.content, masks=task == "instance"), images, classes


def outcome(folder, mutant):
    """None if the mutant was treated as it must be, else what went wrong."""
    expected = None if mutant.cleaned is None else read(folder, mutant.split, mutant.task, json.dumps(mutant.cleaned))
    try:
        found = read(folder, mutant.split, mutant.task, mutant.text)
    except DataError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            return f"not one sentence: {error}"
        return None if expected is None else f"refused ({error})"
    except Exception as error:  # what is looked for
        return f"traceback ({type(error).__name__}: {error})"
    if expected is None:
        return "not refused"
    return None if found == expected else "read otherwise than its cleaned file"


def test_a_faulty_file_is_refused_or_read_as_its_cleaned_file(folder, exhaustive, capsys):
    count = EXHAUSTIVE if exhaustive else USUAL
    wrong, seen = [], Counter()
    for number, mutant in enumerate(mutants(SEED, count)):
        seen.update(mutant.name.split("+"))
        seen["refused" if mutant.cleaned is None else "read"] += 1
        seen[f"{mutant.split} {mutant.task}"] += 1
        verdict = outcome(folder, mutant)
        if verdict is not None:
            wrong.append(f"mutant {number} ({mutant.name}, {mutant.split}, {mutant.task}): {verdict}")
    if exhaustive:
        with capsys.disabled():
            counts = f"{seen['refused']} to refuse, {seen['read']} to read, {len(wrong)} treated otherwise"
            print(f"\n{count} mutants, seed {SEED}: {counts}")
    assert not wrong, "\n".join(wrong[:20])
    # All kinds of faults were tried, on both splits and tasks.
    assert {*OBJECT_FAULTS, *FILE_FAULTS} <= seen.keys()
    assert all(seen[f"{split} {task}"] > count / 8 for split in SPLITS for task in TASKS)
    assert min(seen["refused"], seen["read"]) > count / 5


def test_the_sound_file_is_used_whole(folder):
    samples, truth, images, _ = read(folder, "train", "instance", json.dumps(sound_content()))
    assert sum(len(sample["instances"]) for sample in samples) == len(sound_content()["annotations"]) > 20
    assert len(truth["annotations"]) == len(sound_content()["annotations"]) and len(images) == 8 and len(samples) == 7
