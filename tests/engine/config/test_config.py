"""One JSON: what is accepted, what is refused and in which words, and that the saved file repeats the run."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import solve_batch
from engine.config.deepspeed_keys import DEEPSPEED_KEYS, REMOVED_KEYS
from engine.config.load import apply_override, find_config, load_json
from engine.config.origin import Origin
from engine.config.schema import ResumePolicy, RunConfig, block_of
from engine.errors import ConfigError
from engine.recipes.load import load_config, parse_config

SPLIT = {"annotations": "a.json", "images": "pictures"}
MINIMAL = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 2},
    "detector": {"config": "tiny_retinanet"},
    "data": {"dataset": "coco", "root": "photos", "train": SPLIT, "val": SPLIT},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "schedule": {"epochs": 2},
}


def changed(*overrides):
    data = copy.deepcopy(MINIMAL)
    for override in overrides:
        apply_override(data, override)
    return data


def refusal(data):
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    text = str(caught.value)
    assert "\n" not in text and "pydantic" not in text
    return text


@pytest.mark.parametrize(
    "override,wrong,meant",
    [
        ("train_batchsize=8", "train_batchsize", "train_batch_size"),
        ("zero_optimisation={}", "zero_optimisation", "zero_optimization"),
        ("shedule={}", "shedule", "schedule"),
        ("detector.load_form=x.pth", "detector.load_form", "load_from"),
        ("data.train.image=folder", "data.train.image", "images"),
        ("data.shapes.image_sze=64", "data.shapes.image_sze", "image_size"),
        ("optimizer.paramwise.norm_decya=false", "optimizer.paramwise.norm_decya", "norm_decay"),
        ("optimizer.sam.roh=0.1", "optimizer.sam.roh", "rho"),
        ("run.log_intervall=3", "run.log_intervall", "log_interval"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(override, wrong, meant):
    assert refusal(changed(override)) == f'unknown key "{wrong}" (did you mean "{meant}"?)'


def test_a_misspelt_required_key_is_unknown_rather_than_missing():
    assert (
        refusal({**MINIMAL, "detector": {"confg": "tiny_retinanet"}})
        == 'unknown key "detector.confg" (did you mean "config"?)'
    )


def test_a_key_like_no_other_gets_no_guess():
    assert refusal({**MINIMAL, "qqqq": 1}) == 'unknown key "qqqq"'


@pytest.mark.parametrize(
    "override,sentence",
    [
        ('run.seed="3"', "run.seed must be a whole number, got '3'"),
        ("run.seed=true", "run.seed must be a whole number, got True"),
        ("data.keep_empty=1", "data.keep_empty must be true or false, got 1"),
        ("data.flip=often", "data.flip must be a number, got 'often'"),
        ("detector.config=7", "detector.config must be text, got 7"),
        ("detector.frozen=backbone", "detector.frozen must be a list, got 'backbone'"),
        ("schedule=3", "schedule must be an object, got 3"),
        ('data.scale=[640,"x"]', "data.scale.1 must be a whole number, got 'x'"),
        ("data.flip=1.5", "data.flip must be at most 1.0, got 1.5"),
        ("data.workers=-1", "data.workers must be at least 0, got -1"),
        ("schedule.epochs=0", "schedule.epochs must be above 0.0, got 0"),
        ("schedule.milestones=[-1]", "schedule.milestones must be at least 0, got [-1.0]"),
        ("optimizer.sam.rho=0", "optimizer.sam.rho must be above 0.0, got 0"),
        ("optimizer.paramwise.lr_mult.neck=-1", "optimizer.paramwise.lr_mult.neck must be at least 0.0, got -1"),
        ("data.scale=[640,8]", "data.scale must be two sides of at least 16 pixels, got [640, 8]"),
        ("data.train_scales=[[640,480]]", "data.train_scales must be two [longer, shorter] pairs, got [[640, 480]]"),
        (
            "data.task=boxes",
            "data.task must be one of 'detection', 'instance', 'panoptic', 'semantic' or 'classification', got 'boxes'",
        ),
        (
            "schedule.decay=linear",
            "schedule.decay must be one of 'multistep', 'poly', 'cosine' or 'constant', got 'linear'",
        ),
        ("schedule.steps=5", "schedule needs exactly one of epochs and steps"),
        (
            "data.val=null",
            'data.val is missing: give {"annotations": FILE, "images": FOLDER}, or set data.dataset to "shapes"',
        ),
        ("zero_optimization=2", 'zero_optimization must be an object such as {"stage": 2}, got 2'),
        ("zero_optimization.stage=4", "zero_optimization.stage must be 0, 1, 2 or 3, got 4"),
        ("zero_optimization.stage=true", "zero_optimization.stage must be 0, 1, 2 or 3, got True"),
        ("bfloat16=true", 'bfloat16 must be an object such as {"enabled": true}, got True'),
        ("gradient_clipping=-1", "gradient_clipping must be a number >= 0 (0 means none), got -1"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(override, sentence):
    assert refusal(changed(override)) == sentence


@pytest.mark.parametrize("block", ["detector", "data", "optimizer", "schedule"])
def test_a_missing_block_is_named(block):
    data = changed()
    del data[block]
    assert refusal(data) == f'the key "{block}" is missing'


def test_two_half_precisions_are_refused_under_either_name():
    half = {"enabled": True}
    assert "both enabled" in refusal({**MINIMAL, "fp16": half, "bf16": half})
    assert "both enabled" in refusal({**MINIMAL, "fp16": half, "bfloat16": half})


def test_the_scheduler_of_deepspeed_is_refused():
    assert '"schedule"' in refusal({**MINIMAL, "scheduler": {"type": "WarmupLR"}})


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text,words",
    [
        ('{"train_batch_size": 8,}', "is not JSON: "),
        ("", "is not JSON: "),
        ("[1, 2]", "must hold a JSON object, not a list"),
        ('{"run": {"seed": 1, "draw": 2, "seed": 3}}', 'the key "seed" stands twice'),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
    ],
)
def test_a_malformed_file_is_refused_in_one_sentence(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "bad.json", text))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_syntax_error_names_file_line_and_column(tmp_path):
    with pytest.raises(ConfigError, match=r"bad\.json is not JSON: .* at line 2, column 1"):
        load_config(write(tmp_path / "bad.json", '{"train_batch_size": 8\n"run": {}}'))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match="bad.json is not JSON"):
        load_config(str(tmp_path / "bad.json"))


def test_overrides_are_json_where_they_parse_and_text_elsewhere():
    config = parse_config(
        changed(
            "run.seed=7",
            "data.scale=[640,480]",
            "run.work_dir=/runs/one=two",
            'detector.options={"neck.num_outs":4}',
            "detector.options.backbone.depth=50",
            "optimizer.paramwise.lr_mult.backbone.layer1=0.5",
            "data.keep_empty=true",
            "bf16.enabled=true",
            "run.eval_backend=faster-coco-eval",
        )
    )
    assert (config.run.seed, config.data.scale, config.run.work_dir) == (7, [640, 480], "/runs/one=two")
    assert config.detector.options == {"neck.num_outs": 4, "backbone.depth": 50}
    assert config.optimizer.paramwise.lr_mult == {"backbone.layer1": 0.5}
    assert config.data.keep_empty is True and config.deepspeed["bf16"] == {"enabled": True}
    assert config.run.eval_backend == "faster-coco-eval"


@pytest.mark.parametrize(
    "override,words",
    [
        ("run.seed", "--set takes KEY=VALUE"),
        ("=3", "--set takes KEY=VALUE"),
        ("run.seed=NaN", "NaN is not JSON"),
        ("schedule.epochs=1e999", "a number that is not finite"),
        ("train_batch_size.x=1", '"train_batch_size" is a value and has no keys below it'),
    ],
)
def test_a_bad_override_is_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        changed(override)


def test_overrides_reach_below_what_a_saved_config_writes_as_null():
    saved = parse_config(changed("data.dataset=shapes", "data.train=null", "data.val=null")).to_json()
    for override in (
        "data.dataset=coco",
        "data.train.annotations=/a.json",
        "data.train.images=/i",
        "data.val.annotations=/a.json",
        "data.val.images=/i",
    ):
        apply_override(saved, override)
    assert parse_config(saved).data.train.annotations == "/a.json"


def test_paths_become_absolute_from_root_home_and_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACE", "deep/er")
    (tmp_path / "mine.py").write_text("model = dict()")
    config = parse_config(
        changed(
            "detector.load_from=$PLACE/w.pth",
            "run.work_dir=~/w",
            "data.val.images=/else/where",
            "detector.config=mine.py",
        ),
        origin=Origin.USER,
    )
    assert config.data.train.annotations == str(tmp_path / "photos" / "a.json")
    assert config.data.val.images == "/else/where"
    assert config.detector.load_from == str(tmp_path / "deep" / "er" / "w.pth")
    assert config.detector.config == str(tmp_path / "mine.py")
    assert config.run.work_dir == str(Path.home() / "w")
    monkeypatch.chdir("/")
    again = parse_config(config.to_json(), origin=Origin.USER)
    assert again == config  # the saved file means the same from anywhere


LETTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])  # what our JSON may hold
WHOLE = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = {
    "run.seed": st.integers(0, 2**40),
    "run.draw": st.integers(0, 64),
    "data.flip": st.floats(0, 1),
    "schedule.epochs": st.floats(1e-3, 1e3),
    "schedule.decay": st.sampled_from(["multistep", "poly", "cosine", "constant"]),
    "optimizer.params": st.dictionaries(
        st.text(LETTERS, min_size=1, max_size=5), st.floats(allow_nan=False, allow_infinity=False)
    ),
    "detector.options": st.dictionaries(
        st.sampled_from(["backbone.depth", "neck.x"]), st.none() | WHOLE | st.text(LETTERS)
    ),
    "data.scale": st.lists(st.integers(16, 2000), min_size=2, max_size=2),
    "run.work_dir": st.sampled_from([None, "/w d"]),
    "data.augmentation": st.lists(st.just({"type": "RandomCrop", "crop_size": [3, 4]}), max_size=2),
    "bf16.enabled": st.booleans(),
    "zero_optimization.stage": st.integers(0, 3),
    "gradient_clipping": st.floats(0, 100),
}


@settings(deadline=None)  # a busy machine is no fault
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_the_saved_config_is_the_config(values):
    data = changed(*(f"{key}={json.dumps(value)}" for key, value in values.items()))
    config = parse_config(data, origin=Origin.USER)
    through_file = json.loads(json.dumps(config.to_json()))
    assert parse_config(through_file, origin=Origin.USER) == config
    for key, value in values.items():
        node = through_file
        for part in key.split("."):
            node = node[part]
        assert node == value, key


def test_parsing_leaves_its_input_alone():
    data = changed()
    parse_config(data)
    assert data == MINIMAL


SHIPPED = sorted(path for path in (Path(__file__).parents[3] / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_parses(path):
    config = load_config(str(path))
    assert config.name == path.stem and parse_config(config.to_json(), origin=Origin.USER) == config


def test_shipped_configs_are_found_by_name_from_any_directory(tmp_path):
    code = (
        "from engine.config.load import find_config\n"
        "print(*(find_config(n) for n in ('quickstart', 'quickstart.json', 'ds_configs/quickstart.json')), sep='\\n')"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    ours = next(path for path in SHIPPED if path.stem == "quickstart")
    assert [Path(p).read_text() for p in found.stdout.splitlines()] == [ours.read_text()] * 3


def test_a_wrong_name_or_path_is_not_taken_for_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r'"quikstart" is neither a file .* \(did you mean "quickstart"\?\)'):
        find_config("quikstart")
    with pytest.raises(ConfigError, match="my/quickstart.json"):
        find_config("my/quickstart.json")


class Asked(dict):
    """A config that remembers which keys were looked for."""

    seen: set = set()

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.add(key)
        return super().__contains__(key)

    def keys(self):
        return self  # `key in config.keys()` must be seen too


def test_the_known_keys_are_those_that_deepspeed_reads():
    from engine.zero.processes import import_deepspeed

    import_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig

    Asked.seen = set()
    DeepSpeedConfig(Asked(train_batch_size=1))
    # sequence_parallel_size is asked for in a process group only, and would contradict our batch triangle.
    ours = {"optimizer", "scheduler", "sequence_parallel_size"}
    assert Asked.seen - REMOVED_KEYS - ours == DEEPSPEED_KEYS.keys()
    assert Asked.seen > REMOVED_KEYS  # it looks for them, to refuse them


@pytest.mark.parametrize("key", sorted(REMOVED_KEYS))
def test_a_key_that_deepspeed_gave_up_is_refused_by_both(key):
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError):
        DeepSpeedConfig({"train_batch_size": 1, key: {}})
    assert refusal({**MINIMAL, key: {}}) == f'DeepSpeed 0.19 no longer has "{key}": remove the key'


def undecided(block, path=""):
    """The fields below a block that have no resume policy, neither their own nor one above them."""
    for name, field in block.model_fields.items():
        if "resume" not in (field.json_schema_extra or {}) and (path, name) != ("", "deepspeed"):
            inner = block_of(field.annotation)
            yield from [path + name] if inner is None else undecided(inner, f"{path}{name}.")


def test_every_field_says_whether_it_may_change_on_resume():
    assert list(undecided(RunConfig)) == []  # DEEPSPEED_KEYS has the policies of DeepSpeed's keys
    assert set(DEEPSPEED_KEYS.values()) == set(get_args(ResumePolicy))


def test_the_page_on_the_config_is_the_one_the_schema_gives():
    from engine.config.document import page

    assert (Path(__file__).parents[3] / "docs" / "config.md").read_text() == page()


@pytest.mark.parametrize(
    "name, world, micro, epochs, lr",
    [
        ("uninet_g_htcx_coco", 480, 2, 11, 1.5e-4),
        ("uninet_g_htcx_o365", 32, 2, 20, 8e-5),
        ("uninet_g_in22k", 640, 8, 150, 5e-3),
    ],
)
def test_the_papers_runs_have_the_papers_numbers(name, world, micro, epochs, lr):
    """And DeepSpeed takes their keys (asked for one rank, as there is no process group here)."""
    from engine.zero.settings import check_deepspeed

    config = load_config(name, [])
    assert solve_batch(config.deepspeed, world).micro == micro
    assert config.schedule.epochs == epochs and config.optimizer.params["lr"] == lr
    check_deepspeed(
        {
            **config.deepspeed,
            **solve_batch(
                {**config.deepspeed, "gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": micro}, 1
            ).as_keys(),
        }
    )


def test_a_byte_order_mark_before_the_json_is_read(tmp_path):
    (tmp_path / "run.json").write_text('{"train_batch_size": 4}', encoding="utf-8-sig")
    assert load_json(tmp_path / "run.json") == {"train_batch_size": 4}
