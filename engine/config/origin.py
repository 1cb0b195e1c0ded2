"""Who wrote a config: the user, or whoever made the file that carries it. docs/security.md says what follows.

A config is code: it may name Python files and classes by their import path. That is meant for what the user wrote. A
config that arrives inside a weight file or a checkpoint folder is data of somebody else: it may only name registered
classes, zoo names and `mmdet::` names. This module checks the text of a config; `models.carried_names` checks the
classes when they are built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from engine.errors import ConfigError, short

TRUST = "if you trust its author, add --trust-config, or give your own --deepspeed_config"


class Origin(Enum):
    USER = "written by the user"
    FILE = "carried by a file"


# Values that lead out of the config: to a file or a server. No class that may be named needs one.
_PATH = re.compile(r"[/\\]|^~|^\.\.|\$|\.(py|pyc|so|pth?|pkl|pickle|ckpt|bin|npy|npz|ya?ml|json|toml|h5|safetensors)$")
_ZOO_NAME = re.compile(r"\w+")
_MMDET_NAME = re.compile(r"mmdet::\w[\w.-]*/\w[\w.-]*\.py")
_TIMM_NAME = re.compile(r"timm::\w[\w.-]*")
# Keys with which mmengine or mmdet read files, import modules or change the registries, whatever the value.
_KEYS = ("_base_", "_scope_", "custom_imports", "teacher_config", "teacher_ckpt", "checkpoint", "checkpoint_path")
_UNSET_KEYS = ("backend_args", "file_client_args", "pretrained", "imdecode_backend")  # harmless as null or false
# DeepSpeed's keys that write to a place of their own choice, send records to a server, or import modules by name.
_DEEPSPEED = (
    ("wandb", "enabled"),
    ("comet", "enabled"),
    ("flops_profiler", "output_file"),
    ("torch_autocast", "lower_precision_safe_modules"),
    ("autotuning", "enabled"),
    ("data_efficiency", "enabled"),
    ("hybrid_engine", "enabled"),
    ("compile", "backend"),
    ("aio", None),
    ("datastates_ckpt", None),
)


def check_carried(config: Any, source: str) -> None:
    """Refuse a config that `source` carries if it names more than registered things. The classes are checked later."""
    for problem in _problems(config):
        raise ConfigError(f"{source} carries a config in which {problem}: {TRUST}")


def _problems(config: Any) -> Iterator[str]:
    name = config.detector.config
    if not any(form.fullmatch(name) for form in (_ZOO_NAME, _MMDET_NAME, _TIMM_NAME)):
        yield (
            f'detector.config is "{short(name, 200)}", which is no name of the zoo, of mmdet:: or of timm:: but a file'
        )
    yield from outside(config.detector.options, "detector.options")
    yield from outside(config.data.augmentation, "data.augmentation")
    yield from _deepspeed_problems(config.deepspeed)


def outside(node: Any, where: str) -> Iterator[str]:
    """What in a part of a config leads out of it: files, servers, modules."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            place = f"{where}.{key}"
            last = str(key).rsplit(".", 1)[-1]
            if last in _KEYS or (last in _UNSET_KEYS and value not in (None, False)):
                yield f"{short(place)} is set, with which files or modules are loaded"
            yield from outside(value, place)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from outside(value, f"{where}[{number}]")
    elif isinstance(node, str) and _PATH.search(node):
        yield f'{short(where)} is "{short(node)}", which is the name of a file or a place'
    elif node is not None and not isinstance(node, (str, int, float)):
        yield f"{short(where)} is a {type(node).__name__} and not a plain value"


def _deepspeed_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    for block, key in _DEEPSPEED:
        content = settings.get(block)
        value = content.get(key) if key is not None and isinstance(content, Mapping) else content
        if value:
            place = f"{block}.{key}" if key else block
            yield f"{place} is set, which writes, sends or imports what the config says"
    for block, content in settings.items():
        for place, text in _texts(content, block):
            if _PATH.search(text):
                yield f'{short(place)} is "{short(text)}", which is the name of a file or a place'


def _texts(node: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _texts(value, f"{where}.{key}")
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _texts(value, f"{where}[{number}]")
    elif isinstance(node, str):
        yield where, node
