"""Mutants of what a user can type or bring: 0 tracebacks, 0 hangs, 0 silent wrongs. `--fuzz N` tries N of each kind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fuzzing import (
    Outcomes,
    carried_mutant,
    config_mutant,
    judge,
    manifest_mutant,
    override_mutant,
    watched,
)
from tiny_run import TINY

from models.mmdet_setup import import_mmdet

import_mmdet()

from engine.checkpoints.manifest import NAME, Manifest  # noqa: E402
from engine.config import solve_batch  # noqa: E402
from engine.config.load import apply_override, load_json  # noqa: E402
from engine.config.optimizer_names import spelled  # noqa: E402
from engine.data.augmentation import build_augmentation  # noqa: E402
from engine.data.types import Classes  # noqa: E402
from engine.errors import CheckpointError, UserError  # noqa: E402
from engine.modeling.detector import build_detector, build_preprocessor  # noqa: E402
from engine.optim.registry import build_optimizer  # noqa: E402
from engine.optim.schedule import build_schedule  # noqa: E402
from engine.planning.step_trace import build_empty_model  # noqa: E402
from engine.recipes.load import carried_config, load_config  # noqa: E402
from engine.tasks.registry import task_of  # noqa: E402
from engine.train.build import check_supported  # noqa: E402
from engine.zero.checked_files import checksum  # noqa: E402
from engine.zero.monitors import check_monitors  # noqa: E402
from engine.zero.processes import import_deepspeed  # noqa: E402
from engine.zero.settings import check_deepspeed  # noqa: E402

SEED = 16
CLASSES = Classes(("circle", "square", "triangle"), (), (1, 2, 3))


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz")


def conclude(outcomes: Outcomes, count: int, capsys: Any) -> None:
    with capsys.disabled():
        print(f"\nseed {SEED}: {count} mutants, {outcomes}")
    assert not outcomes.faults, "\n".join(outcomes.faults[:40])
    assert sum(outcomes.counts.values()) == count and min(outcomes.counts.values()) > 0.02 * count


class Acceptance:
    """Whether a config would be accepted, by the checks of a run before its first step, without data and weights."""

    def __init__(self) -> None:
        import_deepspeed()
        self.built: dict[str, Any] = {}

    def __call__(self, config: Any) -> None:
        import torch

        plan = solve_batch(config.deepspeed, 1)
        check_supported(config, resuming=False)
        check_deepspeed({**config.deepspeed, **plan.as_keys()})
        check_monitors(config.deepspeed, writes=False)
        # Most mutants have the same model, which is built once: then its optimizer takes a millisecond.
        key = json.dumps([config.detector.model_dump(), config.data.augmentation, config.data.task, config.deepspeed])
        if key not in self.built:
            try:
                task_of(config).check()
                with torch.device("meta"):
                    self.built[key] = build_empty_model(config, CLASSES)
            except UserError as error:
                self.built[key] = error
        model = self.built[key]
        if isinstance(model, UserError):
            raise model
        schedule = build_schedule(config.schedule, steps_per_epoch=10)
        build_optimizer(config.optimizer, model, warmup_steps=schedule.warmup_steps)


PATHS = {"root", "annotations", "images", "panoptic", "load_from", "work_dir", "config"}


def lost(given: Any, result: Any, where: str = "") -> str | None:
    """The first value that was given and is not in the result."""
    if isinstance(given, dict) and isinstance(result, dict):
        for key, value in given.items():
            if value is None or value == "auto" or key in PATHS:
                continue
            if key not in result:
                return f"{where}.{key} is gone"
            if key == "options":  # merged with the recipe's
                continue
            wrong = lost(value, result[key], f"{where}.{key}")
            if wrong:
                return wrong
        return None
    if where == ".optimizer.type":
        given = spelled(given)
    if where in (".data.train", ".data.val"):
        return None
    return None if given == result and isinstance(given, bool) == isinstance(result, bool) else f"{where} is {result!r}"


@pytest.mark.parametrize("mutate", [config_mutant, override_mutant])
def test_a_config_is_refused_in_a_sentence_or_means_what_it_says(mutate, count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, outcomes, accept = random.Random(SEED), Outcomes(), Acceptance()
    path = tmp_path / "mutant.json"
    with watched(tmp_path) as harm:
        for number in range(count):
            mutant = mutate(draw)

            def attempt(mutant=mutant):
                path.write_bytes(mutant.text)
                config = load_config(str(path), mutant.overrides)
                accept(config)
                given = load_json(path)
                for override in mutant.overrides:
                    apply_override(given, override)
                return lost(given, json.loads(json.dumps(config.to_json())))

            judge(outcomes, f"{number}: {mutant.what}", mutant.must, attempt, UserError, harm)
    conclude(outcomes, count, capsys)


def test_a_carried_config_runs_nothing(count, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, outcomes = random.Random(SEED), Outcomes()
    with watched(tmp_path) as harm:
        for number in range(count):
            what, data, must = carried_mutant(draw)

            def attempt(data=data):
                config = carried_config(data, "a file")
                if config.data.task == "classification":
                    task_of(config).build_model(CLASSES)
                    return None
                build_augmentation(config.data)
                build_detector(config.detector, CLASSES)
                build_preprocessor(config.detector, CLASSES)
                return lost(json.loads(json.dumps(data)), json.loads(json.dumps(config.to_json())))

            judge(outcomes, f"{number}: {what}", must, attempt, UserError, harm)
    conclude(outcomes, count, capsys)


def test_a_manifest_is_refused_or_stays_in_its_folder(count, tmp_path, capsys):
    draw, outcomes, folder = random.Random(SEED), Outcomes(), tmp_path / "step-000003"
    (folder / "zero").mkdir(parents=True)
    for name in ("rank_00000.pt", "zero/x.pt"):
        (folder / name).write_bytes(name.encode())
    files = {name: checksum(folder / name) for name in ("rank_00000.pt", "zero/x.pt")}
    shapes = {"backbone.conv.weight": [8, 3, 7, 7], "neck.bias": [4], "scale": []}
    Manifest(
        step=3, world=1, stage=2, layout="ZeroOneTwo", precision="float32", parameters=shapes,
        aliases={"head.bias": "neck.bias"}, files=files,
    ).write(folder)  # fmt: skip
    good = json.loads((folder / NAME).read_text())
    for number in range(count):
        what, text, must = manifest_mutant(draw, good)

        def attempt(text=text):
            (folder / NAME).write_bytes(text)
            manifest = Manifest.read(folder)
            damage = manifest.damage(folder)
            if damage is not None:
                raise CheckpointError(damage)
            inside = all((folder / name).resolve().is_relative_to(folder.resolve()) for name in manifest.files)
            content = json.loads(text.decode("utf-8-sig"))
            same = manifest.parameters == content["parameters"] and manifest.step == content["step"]
            return None if inside and same else "it is read as something else"

        judge(outcomes, f"{number}: {what}", must, attempt, CheckpointError, [])
    conclude(outcomes, count, capsys)


def test_the_fuzzer_finds_a_fault(tmp_path):
    """It would notice each of the four: a traceback, an accepted lie, a wrong refusal, code that runs."""

    def refuse():
        raise UserError("no")

    outcomes = Outcomes()
    judge(outcomes, "traceback", "either", lambda: json.loads("{"), UserError, [])
    judge(outcomes, "lie", "either", lambda: lost(TINY, {**TINY, "run": {"seed": 4}}), UserError, [])
    judge(outcomes, "refusal", "accept", refuse, UserError, [])
    judge(outcomes, "long", "refuse", lambda: None, UserError, [])
    with watched(tmp_path) as harm:
        judge(outcomes, "harm", "either", lambda: __import__("os").system("true") and None, UserError, harm)
    assert len(outcomes.faults) == 5, outcomes.faults
