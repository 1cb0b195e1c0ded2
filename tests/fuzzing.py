"""Seeded mutants of configs, overrides, manifests and carried configs, labelled beforehand, and what became of them.

A mutant is refused with a UserError, or accepted and then means what it says. Anything else is a fault: another
exception, more than `LIMIT` seconds, an accepted value that is not in the result, code that runs.
"""

from __future__ import annotations

import copy
import json
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tiny_run import TINY, merged

LIMIT = 20.0  # seconds for one mutant, on a busy machine
LONGEST = 2500  # letters of a message
SPLIT = {"annotations": "a.json", "images": "pictures"}
BASES: list[dict[str, Any]] = [
    TINY,
    merged({"data": {"dataset": "coco", "root": "photos", "train": SPLIT, "val": SPLIT}}),
    {"recipe": "faster_rcnn_r50_agvm_sgd", "train_batch_size": 32, "data": {"root": "photos"}},
    merged({"data": {"augmentation": [{"type": "RandomCrop", "crop_size": [64, 64]}]}, "bf16": {"enabled": True}}),
]
# Values that are well-formed JSON, and mostly wrong.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**62, 2**63, 10**30, 0.5, -0.1, 1e-30, 1e300, 1.0,
    "", "auto", "x", "3", "true", "adamw", "../..", "~nosuchuser/x", "a/b.json", "$HOME", "x" * 5000, "é\u2028",
    "a\x00b", "\ud800", [], [1], [1, 2], [640, 480], [[1, 2], [3, 4]], ["x"], [None], {}, {"a": 1}, {"type": "SGD"},
    {"enabled": True}, {"enabled": "yes"}, {"stage": 2}, {"": 1}, [[[[[]]]]],
]  # fmt: skip
TEXTS = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "[" * 90 + "]" * 90, "[" * 100_000, "{\"a\":" * 3000,
    '"\\ud800"', '"\\u0000"', "tru", "'x'", "0x10", "1_000", "01", "\"\n\"", "",
]  # fmt: skip
KEYS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16",
    "bf16", "zero_optimization", "zero_optimization.stage", "zero_optimization.reduce_bucket_size", "tensorboard",
    "wandb.enabled", "comet", "csv_monitor.enabled", "communication_data_type", "data_types.grad_accum_dtype",
    "torch_autocast", "activation_checkpointing", "timers", "flops_profiler", "steps_per_print", "prescale_gradients",
    "name", "recipe", "detector", "detector.config", "detector.options", "detector.options.backbone.depth",
    "detector.options.neck.in_channels", "detector.options.neck", "detector.options.backbone.init_cfg",
    "detector.options.bbox_head.loss_cls.type", "detector.options.test_cfg.nms.type", "detector.options.type",
    "detector.options.train_cfg.assigner.pos_iou_thr", "detector.options.a.b.c", "detector.options..x",
    "detector.load_from", "detector.frozen", "detector.ablation.no_fpn", "detector.ablation.ignored_pixels",
    "detector.sync_bn", "detector.checkpoint_activations", "detector.zero_init", "detector.skippable", "data",
    "data.task", "data.dataset", "data.root", "data.train", "data.val.images", "data.shapes.image_size", "data.scale",
    "data.shapes.train_images", "data.train_scales", "data.flip", "data.augmentation", "data.keep_empty",
    "data.workers", "data.classification.crop_scale", "optimizer", "optimizer.type", "optimizer.params",
    "optimizer.params.lr", "optimizer.params.momentum", "optimizer.params.betas", "optimizer.params.tau",
    "optimizer.params.modules", "optimizer.paramwise.lr_mult.backbone", "optimizer.paramwise.layer_decay",
    "optimizer.sam.rho", "schedule.epochs", "schedule.steps", "schedule.warmup_steps", "schedule.milestones",
    "schedule.decay", "schedule.gamma", "run", "run.seed", "run.work_dir", "run.eval_interval", "run.ema",
    "run.checkpoint_interval", "run.keep_best", "run.on_save_error", "run.draw", "no_such_key", "run.sede", "", ".",
    "..", "run..seed", "run.seed.x",
]  # fmt: skip


class Mutant(NamedTuple):
    what: str
    text: bytes
    overrides: list[str]
    must: str  # "refuse", "accept" or "either"


@dataclass
class Outcomes:
    counts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{dict(self.counts)}, {len(self.faults)} faults"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """An exception in the main thread if it takes longer; elsewhere no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(
    outcomes: Outcomes, name: str, must: str, attempt: Callable[[], str | None], error: type[Exception], harm: list[str]
) -> None:
    """Run a mutant. `attempt` returns what is wrong with an accepted one; `harm` lists what ran, and is emptied."""
    try:
        with time_limit(LIMIT):
            wrong = attempt()
    except error as refusal:
        outcomes.counts["refused"] += 1
        text = str(refusal)
        try:
            text.encode()
        except UnicodeEncodeError:
            outcomes.faults.append(f"{name}: the message cannot be printed: {text[:200]!r}")
        if len(text) > LONGEST:
            outcomes.faults.append(f"{name}: a message of {len(text)} letters: {text[:200]!r}")
        if must == "accept":
            outcomes.faults.append(f"{name}: refused, but it is right: {text[:300]}")
    except BaseException as fault:  # a traceback for the user
        if isinstance(fault, KeyboardInterrupt):
            raise
        outcomes.faults.append(f"{name}: {type(fault).__name__}: {str(fault)[:300]}")
    else:
        outcomes.counts["accepted"] += 1
        if must == "refuse":
            outcomes.faults.append(f"{name}: accepted")
        elif wrong:
            outcomes.faults.append(f"{name}: accepted, but {wrong}")
    if harm:
        outcomes.faults.append(f"{name}: ran {harm[0]}")
        harm.clear()


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below a node."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [p for key, value in items for p in ((*path, key), *places(value, (*path, key)))]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        node = node[part]
    return node


def put(node: Any, path: tuple[Any, ...], value: Any) -> None:
    at(node, path[:-1])[path[-1]] = value


def as_text(data: Any) -> bytes:
    # A whole number may have more digits than Python prints at once.
    return json.dumps(data).encode()


def config_mutant(draw: random.Random) -> Mutant:
    data = copy.deepcopy(draw.choice(BASES))
    kind = draw.choice(("value", "value", "value", "spelling", "bytes", "text", "twice", "mark", "none", "delete"))
    path = draw.choice(places(data))
    if kind == "none":
        return Mutant("unchanged", as_text(data), [], "accept")
    if kind == "mark":
        return Mutant("byte-order mark", b"\xef\xbb\xbf" + as_text(data), [], "accept")
    if kind == "spelling":
        typed = [
            p for p in places(data) if isinstance(p[-1], str) and not {"options", "params", "augmentation"} & {*p[:-1]}
        ]
        path = draw.choice(typed)
        parent = at(data, path[:-1])
        parent[path[-1] + "q"] = parent.pop(path[-1])
        return Mutant(f"misspelt {path}", as_text(data), [], "refuse")
    if kind == "delete":
        parent = at(data, path[:-1])
        parent.pop(path[-1])
        return Mutant(f"without {path}", as_text(data), [], "either")
    if kind == "value":
        value = draw.choice(VALUES)
        put(data, path, value)
        return Mutant(f"{path} = {value!r:.60}", as_text(data), [], "either")
    if kind == "text":
        text = draw.choice(TEXTS)
        put(data, path, "@@")
        mutated = as_text(data).decode().replace('"@@"', text).encode()
        return Mutant(f"{path} = text {text[:30]!r}", mutated, [], "refuse")
    if kind == "twice":
        key = draw.choice([k for k in data if isinstance(data[k], dict)])
        inner = json.dumps(data[key])
        doubled = as_text(data)[:-1] + f", {json.dumps(key)}: {inner}}}".encode()
        return Mutant(f"{key} twice", doubled, [], "refuse")
    text = bytearray(as_text(data))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text))
        action = draw.choice("ird")
        if action == "d":
            del text[place]
        elif action == "i":
            text.insert(place, draw.choice(b'{}[]",:0-.e\\ \x00\xff\xc3a'))
        else:
            text[place] = draw.randrange(256)
    return Mutant("bytes", bytes(text), [], "either")


def override_mutant(draw: random.Random) -> Mutant:
    """Overrides of a good config, well-typed but insane, or no JSON at all."""
    overrides = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice(KEYS)
        if draw.random() < 0.75:
            value = draw.choice(VALUES)
            text = value if isinstance(value, str) and draw.random() < 0.5 else json.dumps(value)
        else:
            text = draw.choice(TEXTS)
        overrides.append(f"{key}={text}" if draw.random() < 0.97 else draw.choice((key, text, "=", "=x", "")))
    return Mutant(f"--set {str(overrides)[:200]}", as_text(draw.choice(BASES)), overrides, "either")


TRAP = "gigadet_fuzz_trap"
ATTACKS: list[Any] = [
    {"type": "os.system", "command": "true"},
    {"type": "subprocess.Popen", "args": ["true"]},
    {"type": "builtins.eval", "source": "1"},
    {"type": f"{TRAP}.Thing"},
    {"type": TRAP},
    {"type": "Linear", "_scope_": TRAP},
    {"type": "mmengine.runner.Runner"},
    {"type": "mmengine.config.Config.fromfile", "filename": "x.py"},
    {"type": "torch.load", "f": "x.pth"},
    {"type": "CameraMotionCompensation", "warp_mode": "__import__('os').system('true')"},
    {"type": "KnowledgeDistillationSingleStageDetector", "teacher_config": "x.py"},
    {"type": "Albu", "transforms": [{"type": "load", "filepath_or_buffer": "x"}]},
    {"type": "BertModel", "name": "x"},
    {"type": "TimmBackbone", "model_name": "resnet10t", "checkpoint_path": "x.pth"},
    {"type": "TimmBackbone", "model_name": "hf-hub:x/y"},
    {"type": "ResNet", "depth": 18, "init_cfg": {"type": "Pretrained", "checkpoint": "x.pth"}},
    {"type": "ResNet", "depth": 18, "init_cfg": [{"type": "Pretrained", "checkpoint": "http://127.0.0.1:9/x.pth"}]},
    {"type": "nms", "iou_threshold": 0.5, "_base_": "x.py"},
    {"type": ["os.system"]},
    {"type": {"a": 1}},
    {"custom_imports": {"imports": [TRAP]}},
    {"_base_": ["x.py"]},
    {"checkpoint": "/tmp/x.pth"},
    "__import__('os').system('true')/",
    "/etc/passwd",
    "../../x",
    "x.py",
    "~/x",
]
DEEPSPEED_ATTACKS: list[dict[str, Any]] = [
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": [f"{TRAP}.Thing"]}},
    {"flops_profiler": {"enabled": True, "output_file": "x"}},
    {"tensorboard": {"enabled": True, "output_path": "/tmp/x"}},
    {"csv_monitor": {"enabled": True, "output_path": "../x"}},
    {"wandb": {"enabled": True}},
    {"comet": {"enabled": True, "api_key": "x"}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp/x"}}},
    {"name": "../../x"},
    {"detector": {"config": "x.py"}},
    {"detector": {"config": "/tmp/x.py"}},
    {"detector": {"config": "mmdet::../../x.py"}},
    {"detector": {"config": "mmdet::_base_/../../../x.py"}},
    {"detector": {"config": "x.yaml", "options": {}}},
    {"detector": {"config": "timm::hf-hub:x/y"}, "data": {"task": "classification"}},
]


def carried_mutant(draw: random.Random) -> tuple[str, Any, str]:
    """What it is, the data as a file carries it, and what must become of it."""
    data = copy.deepcopy(TINY)
    kind = draw.choice(("option", "option", "nested", "augmentation", "deepspeed", "value", "odd", "good"))
    options, attack = data["detector"]["options"], copy.deepcopy(draw.choice(ATTACKS))
    part = draw.choice(("neck", "backbone", "bbox_head", "train_cfg", "test_cfg", "data_preprocessor", "test_cfg.nms"))
    if kind == "option":
        if isinstance(attack, dict) and draw.random() < 0.5:
            attack["_delete_"] = True
        options[part] = attack
        return f"{part} = {attack!r:.100}", data, "refuse"
    if kind == "nested":
        for _ in range(draw.randint(1, 4)):
            attack = draw.choice(([attack], {"x": attack}, {"type": "ReLU", "y": [attack]}))
        options[f"{part}.{draw.choice(('more', 'act_cfg', 'plugins'))}"] = attack
        return f"nested {attack!r:.100}", data, "refuse"
    if kind == "augmentation":
        attack = attack if isinstance(attack, dict) else {"type": attack}
        if draw.random() < 0.5:
            attack = {"type": "RandomApply", "transforms": [attack], "prob": 1.0}
        data["data"]["augmentation"] = [{"type": "PhotoMetricDistortion"}, attack]
        return f"augmentation {attack!r:.100}", data, "refuse"
    if kind == "deepspeed":
        change = draw.choice(DEEPSPEED_ATTACKS)
        return f"{change!r:.100}", merged(change, data), "refuse"
    if kind == "value":
        path = draw.choice(places(data))
        value = draw.choice([*VALUES, b"bytes", {1: 2}, float("nan"), float("inf"), (1, 2), {1, 2}, object, 10**4400])
        put(data, path, value)
        return f"{path} = {type(value).__name__}", data, "either"
    if kind == "odd":
        loop: dict[str, Any] = {}
        loop["loop"] = loop
        bomb: Any = 1
        for _ in range(60):
            bomb = [bomb, bomb]
        deep: Any = 1
        for _ in range(5000):
            deep = {"a": deep}
        odd = draw.choice((loop, bomb, deep))
        options[part] = odd
        return "a dictionary that contains itself, doubles itself or is deep", data, "refuse"
    data["data"]["augmentation"] = draw.choice(([], [{"type": "RandomCrop", "crop_size": [32, 32]}]))
    options["bbox_head.loss_cls"] = {"type": "FocalLoss", "use_sigmoid": True, "gamma": 2.0, "alpha": 0.25}
    return "a good one", data, "accept"


def manifest_mutant(draw: random.Random, good: dict[str, Any]) -> tuple[str, bytes, str]:
    """What it is, the file, and what must become of it. `good` has its checksum."""
    content = copy.deepcopy(good)
    kind = draw.choice(("value", "signed", "signed", "unsigned", "bytes", "name", "old", "good"))
    if kind == "good":
        return "unchanged", as_text(content), "accept"
    if kind == "old":
        del content["sha256"]
        return "of an older version", as_text(content), "accept"
    if kind == "bytes":
        text = bytearray(as_text(content))
        place = draw.randrange(len(text))
        text[place] = (text[place] + draw.randint(1, 255)) % 256
        return f"byte {place}", bytes(text), "either"
    if kind == "name":
        outside = draw.choice(("../x", "/etc/passwd", "a/../../x", "..", "a\\..\\x", "", "."))
        group = draw.choice(("files", "parameters"))
        content[group][outside] = content[group].pop(draw.choice(list(content[group])))
        return f"{group} has {outside!r}", as_text(signed(content)), "refuse"
    path = draw.choice([p for p in places(content) if p != ("sha256",)])
    value = draw.choice(VALUES)
    changed = type(at(content, path)) is not type(value) or at(content, path) != value
    put(content, path, value)
    if kind == "value":
        return f"{path} = {value!r:.60}", as_text(content), "refuse" if changed else "accept"
    if kind == "unsigned":
        del content["sha256"]
    else:
        content = signed(content)
    return f"{kind} {path} = {value!r:.60}", as_text(content), "either"


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """As whoever changed it can do."""
    import hashlib

    rest = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


_HARM: list[str] = []
_WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
            "pickle.find_class", "webbrowser.open", "ftplib.connect")  # fmt: skip
_watching = False


def _audit(event: str, arguments: Any) -> None:
    if not _watching:
        return
    if event in _WATCHED or (event == "import" and str(arguments[0]).startswith(TRAP)):
        _HARM.append(f"{event} {arguments!r:.100}")
    elif event == "open" and Path(str(arguments[0])).name in ("x.py", "x.pth", "x.yaml", "passwd"):
        _HARM.append(f"open {arguments[0]}")


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """What code does meanwhile that no config may cause; a module named TRAP can be imported from `folder`."""
    global _watching
    if not getattr(sys, "_gigadet_audited", False):
        sys.addaudithook(_audit)
        sys._gigadet_audited = True  # type: ignore[attr-defined]
    (folder / f"{TRAP}.py").write_text("class Thing:\n    pass\n")
    sys.path.insert(0, str(folder))
    _HARM.clear()
    _watching = True
    try:
        yield _HARM
    finally:
        _watching = False
        sys.path.remove(str(folder))
        sys.modules.pop(TRAP, None)
