"""Export a checkpoint: as one weight file for mmdet, timm or others, with an mmdet config, or as a universal folder."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.checkpoints.finding import find_checkpoint
from engine.checkpoints.reading import state_dict
from engine.checkpoints.universal import UniversalFolder, write_universal
from engine.config import RunConfig
from engine.config.origin import Origin
from engine.data.coco import test_pipeline
from engine.data.types import Classes
from engine.errors import CheckpointError
from engine.files import replacing
from engine.inference.load import carried_classes
from engine.modeling.detector import model_config
from engine.modeling.weights import META_KEY, whole
from engine.monitoring.live import LiveLine
from engine.recipes.load import carried_config
from engine.zero.checked_files import write_file
from models.mmdet_setup import import_mmdet

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_universal(source: str, out: Path) -> None:
    checkpoint = find_checkpoint(source, say=print)
    if isinstance(checkpoint, UniversalFolder):
        raise CheckpointError(f"{checkpoint.folder} is in the universal format already")
    total = sum(math.prod(shape) for shape in checkpoint.parameters.values())
    line = LiveLine(total=total, label="universal", interval=total)
    write_universal(checkpoint, out, line.advance)
    line.close()
    print(
        f"written {out}: {len(checkpoint.parameters)} parameters with {', '.join(('fp32', *checkpoint.states))}, "
        f"step {checkpoint.step}",
        flush=True,
    )


def export_weights(
    source: str, out: Path, *, ema: bool = False, dtype: str = "float32", origin: Origin = Origin.FILE
) -> list[Path]:
    """Write one `.pth` or `.safetensors`, and for a detector an mmdet config of the same name; returns the paths.

    The checkpoint's config is not trusted, unless `origin` says that the user trusts its author.
    """
    if out.suffix not in (".pth", ".safetensors"):
        raise CheckpointError(f"--out {out} must end in .pth or .safetensors")
    checkpoint = find_checkpoint(source, say=print)
    # Before anything is written: what is carried is checked first.
    config = carried_config(checkpoint.meta.get("config"), str(checkpoint.folder), origin=origin)
    classes = carried_classes(checkpoint.meta.get("dataset_meta"), str(checkpoint.folder))
    model = None if config.data.task == "classification" else model_config(config.detector, classes)
    stored = state_dict(checkpoint, ema=ema)
    line = LiveLine(total=len(stored), label="export", interval=max(1, len(stored)))
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}
    buffers = set(checkpoint.counters()["buffer_names"])
    for name, value in stored.items():
        tensors[name] = _converted(value, None if name in buffers else TYPES[dtype], shared)
        line.update()
    line.close()
    meta = {**checkpoint.meta, "ema": ema}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".pth":
            with replacing(out) as aside:  # a file that mmdet's `init_detector` loads
                write_file(aside, {"state_dict": tensors, "meta": meta})
        else:
            _save_safetensors(out, tensors, meta)
        written = [out]
        if model is not None:
            written.append(_write_mmdet_config(out.with_suffix(".py"), config, model, classes))
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error.strerror or error})") from None
    return written


def _converted(value: Any, dtype: torch.dtype | None, shared: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy in the wanted type (None: its own). Several names of one parameter give the same tensor."""
    if id(value) not in shared:
        tensor = whole(value)
        shared[id(value)] = tensor.to(dtype or tensor.dtype, copy=True)
    return shared[id(value)]


def _save_safetensors(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():  # the format has no shared tensors
        separate[name] = tensor.clone() if tensor.data_ptr() in seen else tensor.contiguous()
        seen.add(tensor.data_ptr())
    try:
        with replacing(path) as aside:
            save_file(separate, str(aside), metadata={"format": "pt", META_KEY: json.dumps(meta)})
    except SafetensorError as error:
        raise OSError(0, str(error)) from None


def _write_mmdet_config(path: Path, config: RunConfig, model: Any, classes: Classes) -> Path:
    """What mmdet's `init_detector` and `inference_detector` need: the model, and how images are prepared."""
    import_mmdet()
    from mmengine.config import Config  # here: import_mmdet() must come first

    if "data_preprocessor" in model:
        model["data_preprocessor"].pop("batch_augments", None)  # for training only
    content: dict[str, Any] = {
        "default_scope": "mmdet",
        "model": model,
        "test_dataloader": {
            "dataset": {
                "type": "CocoDataset",
                "metainfo": {"classes": tuple(classes.all)},
                "pipeline": test_pipeline(config.data),
            }
        },
    }
    if _uses_ours(model):
        content["custom_imports"] = {"imports": ["models.registry"], "allow_failed_imports": False}
    Config(content).dump(str(path))
    return path


def _uses_ours(node: Any) -> bool:
    """Whether a model dictionary names a class of our `models` package."""
    from mmdet.registry import MODELS  # here: import_mmdet() must come first

    if isinstance(node, dict):
        kind = node.get("type")
        found = MODELS.module_dict.get(kind) if isinstance(kind, str) else kind
        return getattr(found, "__module__", "").startswith("models.") or any(map(_uses_ours, node.values()))
    return isinstance(node, Sequence) and not isinstance(node, str) and any(map(_uses_ours, node))
