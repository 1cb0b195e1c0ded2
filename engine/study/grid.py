"""A study from its JSON: its methods, batch sizes, learning rates and seeds, and the config of every run.

All methods are treated alike. The paper's rule gives the learning rate at each batch. A few factors on it are tried
with the first seed, and the best one is run with the other seeds. Epochs and data are the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

import ds_configs
from engine.config import RunConfig
from engine.config.load import find_config, load_json
from engine.config.schema import Block, OptimizerName
from engine.errors import ConfigError, nearest
from engine.files import write_json
from engine.optim.registry import find_rule
from engine.recipes.learning_rate import ScalingLaw
from engine.recipes.load import load_config

STUDIES = Path("ds_configs") / "studies"

# The paper's run at batch 512 has about 370 windows, and alpha 0.97 averages over 33 of them.
PAPER_WINDOWS, PAPER_ALPHA = 370, 0.97


class Method(Block):
    type: OptimizerName = Field(description="optimizer.type")
    lr: float = Field(gt=0, description="learning rate of the smallest batch")
    growth: Literal["linear", "sqrt", "sqrt(1.5)"] = Field(
        "sqrt",
        description="of the learning rate beyond the knee: linear, the square root of the batch (the paper's SGD), "
        "or sqrt(1.5) for a doubling (its AdamW)",
    )
    params: dict[str, Any] = Field({}, description="optimizer.params except lr")
    sam: dict[str, Any] | None = Field(None, description="optimizer.sam")
    set: list[str] = Field([], description="more KEY=VALUE for this method's runs")


class Start(Block):
    method: str = Field(description="method that trains the common start, at the smallest batch with its rule's rate")
    epochs: float = Field(gt=0, description="length of this training")
    keep: list[str] = Field(["backbone"], description="prefixes of the weights that all runs start from")
    set: list[str] = Field([], description="more KEY=VALUE, such as other images")


class Study(Block):
    config: str = Field(description="a run's JSON, or the name of a shipped one")
    set: list[str] = Field([], description="KEY=VALUE for every run")
    metric: str = Field("bbox_mAP_50", description="the metric in eval.json that is compared")
    batches: list[int] = Field(description="batch sizes, ascending")
    micro_batch: int = Field(ge=1, description="micro-batch size; larger batches are accumulated")
    knee: int = Field(ge=1, description="batch up to which learning rates grow linearly")
    epochs: float = Field(gt=0, description="length of every run")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of every run's steps")
    seeds: list[int] = Field([0, 1], description="the learning rate is tuned with the first one")
    sweep: list[float] = Field([0.5, 1.0, 2.0], description="factors on the rule's learning rate")
    start: Start | None = Field(None, description="weights that all runs start from")
    methods: dict[str, Method] = Field(description="methods by their names in tables")

    @model_validator(mode="after")
    def _check(self) -> Study:
        for name, values in (
            ("batches", self.batches),
            ("seeds", self.seeds),
            ("sweep", self.sweep),
            ("methods", self.methods),
        ):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must list at least one value, each once, got {list(values)}")
        strange = [name for name in self.methods if not re.fullmatch(r"[\w+-][\w.+-]*", name)]
        if strange:  # they name folders
            raise ValueError(f"names of methods must be of letters, digits and . + - _, got {strange[0]!r}")
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"seeds must be whole numbers >= 0, got {self.seeds}")
        if self.batches != sorted(self.batches):
            raise ValueError(f"batches must be ascending, got {self.batches}")
        for batch in self.batches:
            if batch % self.micro_batch or batch < 2 * self.micro_batch:
                raise ValueError(
                    f"every batch must be two or more micro-batches of {self.micro_batch} (AGVM compares two "
                    f"halves), got {batch}"
                )
        if not all(factor > 0 for factor in self.sweep):
            raise ValueError(f"sweep must hold factors > 0, got {self.sweep}")
        if self.start is not None and self.start.method not in self.methods:
            raise ValueError(f"start.method must be one of the methods {list(self.methods)}, got {self.start.method!r}")
        return self

    def rate(self, method: str, batch: int) -> float:
        """The learning rate that the rule gives."""
        chosen = self.methods[method]
        doubling = {"linear": 4.0, "sqrt": 2.0, "sqrt(1.5)": 1.5}[chosen.growth]
        return ScalingLaw(name=method, lr=chosen.lr, batch=self.batches[0], knee=self.knee, doubling=doubling)(batch)


class Trial(NamedTuple):
    """One run of the grid."""

    method: str
    batch: int
    factor: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}/batch-{self.batch}-lr-x{self.factor:g}-seed{self.seed}"


def settings(study: Study, trial: Trial) -> tuple[Any, ...]:
    """Everything in which trials of a study can differ. Two trials with equal settings are the same run."""
    method = study.methods[trial.method]
    lr = study.rate(trial.method, trial.batch) * trial.factor
    return method.type, method.params, method.sam, method.set, trial.batch, trial.seed, lr


def shared_runs(study: Study, rows: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    """Pairs of a method and an earlier one, with the batches at which both have the same run."""
    shared: dict[tuple[str, str], list[int]] = {}
    for batch in study.batches:
        for place, method in enumerate(rows):
            own = settings(study, Trial(method, batch, study.sweep[0], study.seeds[0]))
            same = [
                other
                for other in rows[:place]
                if settings(study, Trial(other, batch, study.sweep[0], study.seeds[0])) == own
            ]
            if same:
                shared.setdefault((method, same[0]), []).append(batch)
    return shared


def trial_config(study: Study, trial: Trial, folder: Path, *, images: int, start: Path | None) -> RunConfig:
    method = study.methods[trial.method]
    steps = max(1, round(study.epochs * math.ceil(images / trial.batch)))
    warmup = round(study.warmup * steps)
    lr = study.rate(trial.method, trial.batch) * trial.factor
    memory = agvm_memory(steps - warmup) if method.type.startswith("AGVM") else {}
    return load_config(
        study.config,
        [
            *study.set,
            *batch_settings(study, trial.batch),
            *optimizer_settings(method, lr, memory),
            "schedule.epochs=null",
            f"schedule.steps={steps}",
            "schedule.warmup_epochs=null",
            f"schedule.warmup_steps={warmup}",
            f"run.seed={trial.seed}",
            "run.eval_interval=null",
            "run.checkpoint_interval=0",
            "run.draw=0",
            f"run.work_dir={json.dumps(str(folder))}",
            f"run.log_interval={max(1, steps // 5)}",
            *([] if start is None else [f"detector.load_from={json.dumps(str(start))}"]),
        ],
    )


def optimizer_settings(method: Method, lr: float, memory: dict[str, Any]) -> list[str]:
    """The method's `set` comes last, so that it can change one of its params."""
    params = {**memory, **method.params, "lr": lr}
    return [
        f"optimizer.type={json.dumps(method.type)}",
        f"optimizer.params={json.dumps(params)}",
        f"optimizer.sam={json.dumps(method.sam)}",
        *method.set,
    ]


def batch_settings(study: Study, batch: int) -> list[str]:
    return [
        f"train_batch_size={batch}",
        f"train_micro_batch_size_per_gpu={study.micro_batch}",
        f"gradient_accumulation_steps={batch // study.micro_batch}",
    ]


def agvm_memory(steps: int) -> dict[str, Any]:
    """tau and alpha from the length of the run: at most as many windows as in the paper, and the moving average covers
    the same share of the run (about a twelfth). Fixed in advance, not tuned."""
    tau = max(1, steps // PAPER_WINDOWS)
    windows = max(1, steps // tau)
    memory = windows / PAPER_WINDOWS / (1 - PAPER_ALPHA)
    return {"tau": tau, "alpha": round(max(0.0, 1 - 1 / memory), 3)}


def load_study(name: str, given: dict[str, Any], methods: Sequence[str] | None = None) -> tuple[Study, list[str]]:
    """A study with some of its fields replaced, and the requested methods in the study's order."""
    path = _find(name)
    try:
        study = Study(**{**_with_base(path), **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"study {path}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from None
    for method in methods or ():
        if method not in study.methods:
            raise ConfigError(
                f'method "{method}" is none of {", ".join(study.methods)}{nearest(method, study.methods)}'
            )
    return study, [method for method in study.methods if methods is None or method in methods]


def check_runs(study: Study, rows: Sequence[str]) -> None:
    """Read the config of every run before the first one is trained."""
    for method in rows:
        for batch in study.batches:
            try:
                find_rule(study.methods[method].type)
                trial_config(
                    study, Trial(method, batch, study.sweep[0], study.seeds[0]), Path("unused"), images=1, start=None
                )
            except ConfigError as error:
                raise ConfigError(f'method "{method}" at batch {batch}: {error}') from None


def keep_settings(study: Study, folder: Path) -> None:
    """Save the study's settings in its folder, or refuse a folder whose runs have other settings."""
    path, new = folder / "study.json", study.model_dump(mode="json")
    new["run"] = load_json(find_config(study.config))  # the content: a shipped file may change under the same name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else new
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold a study ({error.strerror}): give another --out") from None
    except ValueError:
        old = {}
    try:
        before = {
            **Study(**{key: value for key, value in old.items() if key != "run"}).model_dump(mode="json"),
            "run": old["run"],
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path} cannot be read as the settings of a study: give another --out, or remove it, if the runs "
            "beside it were made with these settings"
        ) from None
    # More batches, seeds, factors or methods do not change existing runs. But the first batch and the first seed must
    # stay: learning rates start from the former and are tuned with the latter.
    before["sweep"] = new["sweep"]
    for extendable in ("batches", "seeds"):
        before[extendable] = new[extendable] if before[extendable][0] == new[extendable][0] else before[extendable]
    known = before.pop("methods")
    changed = [key for key in before if before[key] != new[key]] + [
        f"methods.{name}" for name in known if name in new["methods"] and known[name] != new["methods"][name]
    ]
    if changed:
        raise ConfigError(f"{folder} holds a study with another {', '.join(changed)}: give another --out, or remove it")
    new["methods"] = {**known, **new["methods"]}  # a method that is left out now may come back, with the same settings
    write_json(path, new, indent=2)


def _with_base(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The content of a study's file, completed with the study that it names as its `base`."""
    data = load_json(path)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"study {path}: base must be the name of a study, got {base!r}")
    below = _find(base)
    if below in (path, *above):
        raise ConfigError(f"study {path} is its own base: name another one, or none")
    return {**_with_base(below, (path, *above)), **data}


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = {
        file.stem: file for folder in ds_configs.__path__ for file in sorted((Path(folder) / "studies").glob("*.json"))
    }
    if name.removesuffix(".json") in shipped:
        return shipped[name.removesuffix(".json")]
    raise ConfigError(
        f'study "{name}" is neither a file nor one of the shipped ones: {", ".join(shipped)}{nearest(name, shipped)}'
    )


def better(a: float, b: float) -> bool:
    """Whether score a is better than b. A run that diverged (NaN) loses against any other."""
    return not math.isnan(a) and (math.isnan(b) or a > b)
