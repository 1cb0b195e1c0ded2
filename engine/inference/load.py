"""Load a trained model from a weight file or a checkpoint folder, ready to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from engine import distributed
from engine.checkpoints.reading import read_weights
from engine.config import RunConfig
from engine.config.origin import Origin
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocess, Preprocessor
from engine.modeling.weights import WeightsError, fit_weights
from engine.plain_json import JsonError, plain
from engine.recipes.load import carried_config, load_config
from engine.tasks.base import Prediction, Task
from engine.tasks.predicting import predict
from engine.tasks.registry import task_of


@dataclass(frozen=True, kw_only=True)
class Loaded:
    model: nn.Module
    preprocess: Preprocess
    config: RunConfig
    task: Task
    classes: Classes
    precision: Precision = Precision()


def load_model(
    checkpoint: str,
    config_name: str | None,
    overrides: Sequence[str],
    *,
    ema: bool = False,
    origin: Origin = Origin.FILE,
) -> Loaded:
    """The model of a weight file or checkpoint folder. Our files contain their config; others need `config_name`.

    The config in a file is not trusted, unless `origin` says that the user trusts its author.
    """
    tensors, meta = read_weights(checkpoint, ema=ema)
    if config_name is not None:
        config = load_config(config_name, overrides)
    elif isinstance(meta.get("config"), dict):
        config = carried_config(meta["config"], str(checkpoint), overrides, origin=origin)
    else:
        raise ConfigError(f"weight file {checkpoint} does not say how its detector is built: give --deepspeed_config")
    task = task_of(config)
    known: Any = meta.get("dataset_meta")
    named = isinstance(known, dict) and known.get("classes")
    classes = carried_classes(known, str(checkpoint)) if named else task.read_classes()
    model = task.build_model(classes)
    report = fit_weights(model, tensors, checkpoint, drop_mismatched=False)
    if report.missing:
        raise WeightsError(f"{report}: it is not a checkpoint of this detector")
    device = distributed.device()
    model = model.to(device).eval()
    return Loaded(
        model=model, preprocess=Preprocessor(model, device, Precision()), config=config, task=task, classes=classes
    )


def carried_classes(meta: Any, source: str) -> Classes:
    """The classes that a file names; WeightsError if they are no names, or do not belong together."""
    try:
        meta = plain(meta)
        names, stuff, ids = (meta.get(key, []) for key in ("classes", "stuff_classes", "category_ids"))
        texts = [*names, *stuff]
    except (JsonError, TypeError, AttributeError):
        raise WeightsError(f"{source} does not list its classes as names") from None
    if not names or not all(isinstance(name, str) for name in texts) or len(stuff) > len(names):
        raise WeightsError(f"{source} does not list its classes as names")
    if ids and (len(ids) != len(names) or not all(type(number) is int for number in ids)):
        raise WeightsError(f"{source} has {len(names)} classes but not as many whole numbers as category_ids")
    return Classes.from_meta(meta)


def predict_images(
    loaded: Loaded, dataset: Any, *, workers: int = 0, unreadable: list[str] | None = None
) -> list[Prediction]:
    """This rank's share of the predictions. `unreadable` takes the reasons for images that are left out."""
    return predict(
        loaded.model,
        loaded.preprocess,
        loaded.precision,
        dataset,
        batch=loaded.config.run.eval_batch_size,
        workers=workers,
        as_numbers=partial(loaded.task.as_numbers, classes=loaded.classes),
        unreadable=unreadable,
    )
