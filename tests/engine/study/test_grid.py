"""A study's arithmetic: learning rates, memory, which runs are due, and what is refused."""

import json
import math

import pytest

from engine.errors import ConfigError
from engine.study.grid import (
    Study,
    Trial,
    agvm_memory,
    better,
    check_runs,
    keep_settings,
    load_study,
    settings,
    shared_runs,
    trial_config,
)
from engine.study.runner import best_trial, due_trials, missing_runs
from engine.study.trial import Outcome

METHODS = {
    "SGD": {"type": "SGD", "lr": 0.02, "params": {"momentum": 0.9}},
    "MegDet": {"type": "SGD", "lr": 0.02, "growth": "linear", "params": {"momentum": 0.9}},
    "AGVM": {"type": "AGVMAdamW", "lr": 1e-3, "growth": "sqrt(1.5)", "params": {"weight_decay": 0.05}},
    "SAM": {"type": "SGD", "lr": 0.02, "sam": {"rho": 0.1}},
}


def study(**changes):
    return Study(
        **{
            "config": "shapes_faster_rcnn",
            "batches": [8, 32, 128],
            "micro_batch": 4,
            "knee": 32,
            "epochs": 6,
            "sweep": [0.5, 1, 2],
            "methods": METHODS,
            **changes,
        }
    )


def outcome(score):
    return Outcome(score, 10, 1.0, 0.1)


def test_learning_rates_follow_the_rule_to_the_knee_and_beyond():
    chosen = study()
    assert [chosen.rate("SGD", b) for b in (8, 32, 128)] == pytest.approx([0.02, 0.08, 0.16])
    assert [chosen.rate("MegDet", b) for b in (8, 32, 128)] == pytest.approx([0.02, 0.08, 0.32])
    assert [chosen.rate("AGVM", b) for b in (8, 32, 128)] == pytest.approx([1e-3, 4e-3, 6e-3])


def test_the_memory_of_agvm_is_the_papers_share_of_the_run():
    assert agvm_memory(370) == {"tau": 1, "alpha": 0.97}
    assert agvm_memory(740) == {"tau": 2, "alpha": 0.97}
    assert agvm_memory(37) == {"tau": 1, "alpha": 0.7}  # a tenth of the windows: 3.33 of them in memory, not 33.3
    assert agvm_memory(3) == {"tau": 1, "alpha": 0.0}


def test_the_config_of_a_run(tmp_path):
    config = trial_config(
        study(), Trial("AGVM", 128, 2.0, 1), tmp_path / "run", images=620, start=tmp_path / "start.pth"
    )
    assert config.deepspeed["train_batch_size"] == 128 and config.deepspeed["gradient_accumulation_steps"] == 32
    assert config.schedule.steps == 30 and config.schedule.warmup_steps == 3 and config.schedule.epochs is None
    assert config.optimizer.params["lr"] == pytest.approx(12e-3) and config.optimizer.params["weight_decay"] == 0.05
    assert config.optimizer.params["alpha"] == agvm_memory(27)["alpha"] and config.run.seed == 1
    assert config.detector.load_from.endswith("start.pth")
    sam = trial_config(study(), Trial("SAM", 8, 1.0, 0), tmp_path / "run", images=620, start=None)
    assert sam.optimizer.sam.rho == 0.1 and sam.detector.load_from is None and "tau" not in sam.optimizer.params


def test_a_methods_own_settings_win_over_what_the_study_makes_of_it(tmp_path):
    methods = {"SGD": {**METHODS["SGD"], "set": ["optimizer.params.momentum=0.7", "gradient_clipping=3"]}}
    config = trial_config(study(methods=methods), Trial("SGD", 8, 1.0, 0), tmp_path, images=620, start=None)
    assert config.optimizer.params == {"lr": 0.02, "momentum": 0.7} and config.deepspeed["gradient_clipping"] == 3


def test_methods_share_a_run_where_their_rules_come_to_the_same():
    chosen = study()
    assert settings(chosen, Trial("SGD", 32, 2, 1)) == settings(chosen, Trial("MegDet", 32, 2, 1))
    assert settings(chosen, Trial("SGD", 32, 2, 1)) != settings(chosen, Trial("MegDet", 32, 2, 0))
    assert shared_runs(chosen, list(METHODS)) == {("MegDet", "SGD"): [8, 32]}  # beyond the knee they part


def test_the_sweep_comes_first_and_the_other_seeds_run_at_its_best():
    chosen, outcomes = study(batches=[8]), {}
    assert due_trials(chosen, ["SGD"], outcomes) == [Trial("SGD", 8, factor, 0) for factor in (0.5, 1, 2)]
    outcomes |= {
        Trial("SGD", 8, 0.5, 0): outcome(0.3),
        Trial("SGD", 8, 1, 0): outcome(0.4),
        Trial("SGD", 8, 2, 0): outcome(math.nan),
    }
    assert due_trials(chosen, ["SGD"], outcomes) == [Trial("SGD", 8, 1, 1)]
    assert missing_runs(chosen, ["SGD"], outcomes) == 1 and missing_runs(chosen, ["SGD", "SAM"], outcomes) == 1 + 4
    outcomes[Trial("SGD", 8, 1, 1)] = outcome(0.2)
    assert due_trials(chosen, ["SGD"], outcomes) == [] and missing_runs(chosen, ["SGD"], outcomes) == 0
    # A rate that was added later wins: the second seed at the old best no longer counts.
    outcomes[Trial("SGD", 8, 4, 0)] = outcome(0.6)
    assert missing_runs(study(batches=[8], sweep=[0.5, 1, 2, 4]), ["SGD"], outcomes) == 1


def test_where_all_diverge_the_smallest_rate_stands_for_the_method():
    outcomes = {Trial("SGD", 8, factor, 0): outcome(math.nan) for factor in (0.5, 1, 2)}
    assert best_trial(study(), "SGD", 8, outcomes).factor == 0.5
    assert better(0.0, math.nan) and not better(math.nan, 0.0) and not better(math.nan, math.nan)


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"batches": []}, "batches must list at least one"),
        ({"batches": [32, 8]}, "ascending"),
        ({"batches": [8, 8]}, "each once"),
        ({"batches": [4]}, "two or more micro-batches of 4"),
        ({"batches": [10]}, "two or more micro-batches of 4"),
        ({"sweep": [0]}, "factors > 0"),
        ({"seeds": [0, -1]}, "seeds must be whole numbers >= 0"),
        ({"methods": {"../up": METHODS["SGD"]}}, "letters, digits and . . - _, got '../up'"),
        ({"start": {"method": "Adam", "epochs": 1}}, "start.method must be one of"),
    ],
)
def test_what_cannot_be_studied_is_refused_in_a_sentence(changes, sentence, tmp_path):
    path = tmp_path / "study.json"
    path.write_text(json.dumps({**study().model_dump(mode="json"), **changes}))
    with pytest.raises(ConfigError, match=sentence):
        load_study(str(path), {})


def test_names_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match='"shape" is neither a file nor one of the shipped ones: .*shapes'):
        load_study("shape", {})
    with pytest.raises(ConfigError, match='method "AdamX" is none of .* .did you mean "AdamW"'):
        load_study("shapes", {}, ["AdamX"])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="broken.json is not JSON: "):
        load_study(str(tmp_path / "broken.json"), {})
    (tmp_path / "twice.json").write_text('{"methods": {"SGD": {}, "SGD": {}}}')
    with pytest.raises(ConfigError, match='the key "SGD" stands twice'):
        load_study(str(tmp_path / "twice.json"), {})


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"type": "AdamX"}, 'method "X" at batch 8: optimizer.type "AdamX" is none of .*AdamW'),
        ({"sam": {"rh": 1}}, 'method "X" at batch 8: .*rh'),
        ({"set": ["optimiser.type=SGD"]}, 'method "X" at batch 8: unknown key "optimiser"'),
    ],
)
def test_every_runs_config_is_read_before_the_first_is_trained(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_runs(study(methods={"SGD": METHODS["SGD"], "X": {**METHODS["SGD"], **changes}}), ["SGD", "X"])


def test_shipped_studies_load_and_keep_the_order_of_their_methods():
    from pathlib import Path

    from ds_configs import __path__ as folders

    names = [file.stem for folder in folders for file in (Path(folder) / "studies").glob("*.json")]
    assert {"shapes", "miniature", "bccd"} <= set(names)
    for name in names:
        chosen, rows = load_study(name, {})
        assert rows == list(chosen.methods)
    assert load_study("shapes", {}, ["AdamW", "SGD"])[1] == ["SGD", "AdamW"]


def test_a_study_on_top_of_another_says_only_what_differs(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"base": "shapes", "epochs": 2, "start": None}))
    mine, shapes = load_study(str(tmp_path / "mine.json"), {})[0], load_study("shapes", {})[0]
    assert mine == shapes.model_copy(update={"epochs": 2.0, "start": None})
    (tmp_path / "next.json").write_text(json.dumps({"base": str(tmp_path / "mine.json"), "epochs": 3}))
    assert load_study(str(tmp_path / "next.json"), {})[0] == mine.model_copy(update={"epochs": 3.0})
    (tmp_path / "mine.json").write_text(json.dumps({"base": str(tmp_path / "next.json")}))
    with pytest.raises(ConfigError, match="mine.json is its own base|next.json is its own base"):
        load_study(str(tmp_path / "next.json"), {})
    (tmp_path / "mine.json").write_text(json.dumps({"base": ["shapes"]}))
    with pytest.raises(ConfigError, match="base must be the name of a study"):
        load_study(str(tmp_path / "mine.json"), {})


def test_a_folder_takes_more_of_the_same_study_and_no_other(tmp_path):
    keep_settings(study(), tmp_path)
    keep_settings(study(batches=[8, 32, 128, 512], seeds=[0, 1, 2], sweep=[0.1, 0.5, 1, 2]), tmp_path)
    for changed in ({"batches": [16, 32]}, {"seeds": [1, 0]}):
        with pytest.raises(ConfigError, match=f"another {next(iter(changed))}"):
            keep_settings(study(**changed), tmp_path)
    with pytest.raises(ConfigError, match="another epochs"):
        keep_settings(study(epochs=7), tmp_path)
    with pytest.raises(ConfigError, match="another methods.SGD"):
        keep_settings(study(methods={**METHODS, "SGD": {"type": "SGD", "lr": 0.5}}), tmp_path)
    # Nor after a study without that method in between.
    keep_settings(study(methods={"SAM": METHODS["SAM"]}), tmp_path)
    with pytest.raises(ConfigError, match="another methods.SGD"):
        keep_settings(study(methods={"SGD": {"type": "SGD", "lr": 0.5}}), tmp_path)


def test_a_folder_is_refused_where_the_runs_own_config_has_changed(tmp_path):
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"train_batch_size": 8}))
    keep_settings(study(config=str(config)), tmp_path / "out")
    config.write_text(json.dumps({"train_batch_size": 8, "gradient_clipping": 2}))
    with pytest.raises(ConfigError, match="another run: "):
        keep_settings(study(config=str(config)), tmp_path / "out")


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold a study"):
        keep_settings(study(), tmp_path / "file")
    for text in ("{", "[1]", "{}"):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as the settings of a study"):
            keep_settings(study(), tmp_path)
