"""Files made by an attacker: every way in that was found, through each kind of file and each command that obeys one.

Before configs in files were checked, 21 of the 31 ran code, most of them with exit code 0 and normal output. The others
failed late, or chose where the run writes and whom it tells.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch
from resumed_run import settings
from safetensors.torch import save_file
from tiny_run import train_tiny

from models.mmdet_setup import import_mmdet

import_mmdet()

from engine.checkpoints.finding import find_checkpoint  # noqa: E402
from engine.checkpoints.manifest import NAME, Manifest  # noqa: E402
from engine.checkpoints.reading import read_weights  # noqa: E402
from engine.config.origin import Origin  # noqa: E402
from engine.errors import CheckpointError, ConfigError, UserError  # noqa: E402
from engine.inference.export import export_weights  # noqa: E402
from engine.inference.load import load_model  # noqa: E402
from engine.modeling.weights import META_KEY, WeightsError, read_file, whole  # noqa: E402
from engine.tasks.registry import task_of  # noqa: E402
from engine.train.work_dir import saved_config  # noqa: E402
from engine.zero.checked_files import write_file  # noqa: E402
from engine.zero.processes import import_deepspeed  # noqa: E402

import_deepspeed()


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.fixture(scope="module")
def saved(ranks):
    """The newest checkpoint of a run at ZeRO-2, one rank."""
    folder = ranks.run(train_tiny, 1, settings("AdamW", 2, schedule={"steps": 3}))[0]["folder"]
    return find_checkpoint(folder).folder


@pytest.fixture(scope="module")
def content(saved):
    tensors, meta = read_weights(saved)
    return {name: whole(value).clone() for name, value in tensors.items()}, meta


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that an attacker has prepared, as the current one and on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    harm = "from pathlib import Path\nPath('harmed').touch()\n"
    (tmp_path / "trap.py").write_text(harm + "class Thing: pass\nmodel = dict(type='RetinaNet')\n")
    (tmp_path / "trapscope").mkdir()
    (tmp_path / "trapscope" / "registry.py").write_text(harm)
    (tmp_path / "lazy.py").write_text(
        "from mmengine.config import read_base\nwith read_base():\n    from .trap import *\n"
    )
    (tmp_path / "base.py").write_text("_base_ = './trap.py'\n")
    (tmp_path / "trap.yaml").write_text("model: !!python/object/apply:os.system ['touch harmed']\n")
    (tmp_path / "trap.json").write_text(
        json.dumps({"custom_imports": {"imports": ["trap"]}, "model": {"type": "RetinaNet"}})
    )
    torch.save({"state_dict": {"x": torch.zeros(1)}, "harm": Harm()}, tmp_path / "trap.pth")
    return tmp_path


SYSTEM = {"type": "os.system", "command": "touch harmed"}
RESNET = {"_delete_": True, "type": "ResNet", "depth": 18}
# What the attacker changes in detector.options.
OPTIONS = {
    "a function instead of a neck": {"neck": {"_delete_": True, **SYSTEM}},
    "a function deep in a head": {"bbox_head.loss_cls": {"_delete_": True, **SYSTEM}},
    "a dotted type": {"neck.type": "os.system"},
    "a module on the path": {"neck": {"_delete_": True, "type": "trap.Thing"}},
    "a module as such": {"neck": {"_delete_": True, "type": "trap"}},
    "a scope": {"neck._scope_": "trapscope"},
    "a scoped name": {"neck": {"_delete_": True, "type": "trapscope.Thing"}},
    "text that mmcv evaluates": {"test_cfg.nms.type": "__import__('os').system('touch harmed')"},
    "text that mmdet evaluates": {
        "train_cfg.assigner": {
            "_delete_": True, "type": "CameraMotionCompensation", "warp_mode": "__import__('os').system('touch harmed')"
        }
    },  # fmt: skip
    "a pickle for the backbone": {"backbone": {**RESNET, "init_cfg": {"type": "Pretrained", "checkpoint": "trap.pth"}}},
    "a pickle in a list": {"backbone": {**RESNET, "init_cfg": [{"type": "Pretrained", "checkpoint": "trap.pth"}]}},
    "a pickle for Swin": {
        "backbone": {"_delete_": True, "type": "SwinTransformer", "init_cfg": {"checkpoint": "trap.pth"}}
    },
    "a pickle for timm": {
        "backbone": {"_delete_": True, "type": "TimmBackbone", "model_name": "resnet10t", "checkpoint_path": "trap.pth"}
    },
    "a teacher in Python": {"type": "KnowledgeDistillationSingleStageDetector", "teacher_config": "trap.py"},
    "a type that is a list": {"neck.type": ["os.system"]},
    "imports": {"custom_imports": {"imports": ["trap"]}},
    "a base": {"neck._base_": "trap.py"},
}  # fmt: skip
# What the attacker changes elsewhere.
CHANGES = {
    "Python": {"detector": {"config": "trap.py"}},
    "Python by its whole path": {"detector": {"config": "{here}/trap.py"}},
    "yaml": {"detector": {"config": "trap.yaml"}},
    "json that imports": {"detector": {"config": "trap.json"}},
    "a lazy config": {"detector": {"config": "lazy.py"}},
    "_base_": {"detector": {"config": "base.py"}},
    "out of mmdet's folder": {"detector": {"config": "mmdet::../../../../../../../../../..{here}/trap.py"}},
    "a function as augmentation": {"data": {"augmentation": [SYSTEM]}},
    "a function inside one": {"data": {"augmentation": [{"type": "RandomApply", "transforms": [SYSTEM]}]}},
    "modules of torch_autocast": {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["trap.Thing"]}
    },
    "a file to overwrite": {"flops_profiler": {"enabled": True, "output_file": "trap.py"}},
    "a folder to write to": {"tensorboard": {"enabled": True, "output_path": "/tmp"}},
    "a server": {"wandb": {"enabled": True, "team": "attacker"}},
    "a work dir elsewhere": {"name": "../../elsewhere"},
}


def attacked(meta, name, here):
    meta = copy.deepcopy(meta)
    config = meta["config"]
    if name in OPTIONS:
        config["detector"]["options"] = {**config["detector"]["options"], **OPTIONS[name]}
    else:
        changes = json.loads(json.dumps(CHANGES[name]).replace("{here}", str(here)))
        for block, values in changes.items():
            config[block] = {**config[block], **values} if isinstance(config.get(block), dict) else values
    return meta


def as_pth(content, meta, saved, path):
    torch.save({"state_dict": content, "meta": meta}, path / "w.pth")
    return path / "w.pth"


def as_safetensors(content, meta, saved, path):
    save_file(content, str(path / "w.safetensors"), metadata={META_KEY: json.dumps(meta)})
    return path / "w.safetensors"


def as_folder(content, meta, saved, path):
    """A checkpoint whose config was replaced, with checksums that fit."""
    folder = path / "run" / "checkpoints" / saved.name
    shutil.copytree(saved, folder)
    name = "mp_rank_00_model_states.pt"
    from engine.zero.checked_files import read_file as read

    states = dict(read(folder / name))
    states["gigadet"] = meta
    manifest = Manifest.read(folder)
    record = write_file(folder / "new.pt", states)
    os.replace(folder / "new.pt", folder / name)
    Manifest(**{**vars(manifest), "files": {**manifest.files, name: record}}).write(folder)
    return folder


CARRIERS = {"pth": as_pth, "safetensors": as_safetensors, "folder": as_folder}


def obey(path, carrier, out):
    """All that the commands do with a carried config before the first image."""
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = load_model(str(path), None, [])
        task_of(loaded.config).check()
        if carrier == "folder":
            export_weights(str(path), out / "out.pth")
            saved_config(str(path))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_we_saved_ourselves_is_obeyed(carrier, content, saved, here):
    path = CARRIERS[carrier](*content, saved, here)
    obey(path, carrier, here)


@pytest.mark.parametrize("name", [*OPTIONS, *CHANGES])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_config_inside_a_file_runs_nothing(carrier, name, content, saved, here):
    tensors, meta = content
    path = CARRIERS[carrier](tensors, attacked(meta, name, here), saved, here)
    commands = {
        "evaluate and infer": lambda: task_of(load_model(str(path), None, []).config).check(),
        **({"export": lambda: export_weights(str(path), here / "out.pth")} if carrier == "folder" else {}),
        **({"resume": lambda: task_of(saved_config(str(path))).check()} if carrier == "folder" else {}),
    }
    for command, run in commands.items():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            if command == "export" and name in ("a function as augmentation", "a function inside one"):
                continue  # an export builds no transforms
            with pytest.raises(UserError) as caught:
                run()
        assert not (here / "harmed").exists(), command
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert not (here / "out.pth").exists() or "augmentation" in name


def test_the_user_can_trust_an_author(content, saved, here):
    tensors, meta = content
    meta = attacked(meta, "a module on the path", here)
    meta["config"]["detector"]["options"]["neck"] = {
        "_delete_": True, "type": "mmdet.models.necks.FPN", "in_channels": [8, 16], "start_level": 0,
        "out_channels": 16, "num_outs": 3,
    }  # fmt: skip
    path = as_pth(tensors, meta, saved, here)
    with pytest.raises(ConfigError, match="--trust-config"):
        load_model(str(path), None, [])
    assert len(load_model(str(path), None, [], origin=Origin.USER).model.neck.lateral_convs) == 2


def test_the_registries_are_closed_even_where_nobody_checks(here):
    """The lowest place: mmengine's own functions, on a dictionary that no check has seen."""
    from mmcv.ops import batched_nms
    from mmdet.registry import MODELS, TASK_UTILS
    from mmengine.runner.checkpoint import CheckpointLoader

    for kind in ("os.system", "trap.Thing", "trap", "trapscope.Thing", "mmengine.model.BaseModel"):
        with pytest.raises((KeyError, RuntimeError)):
            MODELS.build({"type": kind, "command": "touch harmed"})
    with pytest.raises(KeyError, match="_scope_"):
        MODELS.build({"type": "ReLU", "_scope_": "trapscope"})
    with pytest.raises(ValueError, match="warp_mode"):
        TASK_UTILS.build({"type": "CameraMotionCompensation", "warp_mode": "__import__('os').system('touch harmed')"})
    boxes, scores = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 4]]), torch.tensor([0.9, 0.8])
    with pytest.raises(ValueError, match="none of nms"):
        batched_nms(boxes, scores, torch.zeros(2), {"type": "__import__('os').system('touch harmed')"})
    assert len(batched_nms(boxes, scores, torch.zeros(2), {"type": "nms", "iou_threshold": 0.5})[1]) == 1
    with pytest.raises(pickle.UnpicklingError):
        CheckpointLoader.load_checkpoint("trap.pth")
    with pytest.raises(ValueError, match="nothing is downloaded"):
        CheckpointLoader.load_checkpoint("http://127.0.0.1:9/x.pth")
    assert not (here / "harmed").exists()


def test_a_manifest_has_a_checksum_and_an_old_one_without_is_read(saved, tmp_path):
    folder = tmp_path / "step-000003"
    shutil.copytree(saved, folder)
    good = json.loads((folder / NAME).read_text())
    first = next(name for name, shape in good["parameters"].items() if len(shape) == 4)
    flat = {**good["parameters"], first: [torch.Size(good["parameters"][first]).numel()]}
    fewer = {**good["parameters"], first: [good["parameters"][first][0] - 1, *good["parameters"][first][1:]]}

    def manifest(**changes):
        (folder / NAME).write_text(json.dumps({key: v for key, v in {**good, **changes}.items() if v is not None}))
        return find_checkpoint(folder)

    assert manifest(sha256=None).step == 3  # as before there was a checksum
    for shapes in (flat, fewer):
        with pytest.raises(CheckpointError, match="manifest.json was changed after it was written"):
            manifest(parameters=shapes)
        with pytest.raises(CheckpointError, match=f"{first} is .* in its manifest"):
            manifest(parameters=shapes, sha256=None).check_shapes()
        with (
            contextlib.redirect_stdout(io.StringIO()),
            pytest.raises(CheckpointError, match=f"{first} is .* in its manifest"),
        ):
            export_weights(str(folder), tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_nothing_leads_out_of_a_checkpoint_folder(saved, tmp_path):
    folder = tmp_path / "checkpoints" / "step-000003"
    shutil.copytree(saved, folder)
    name = "rank_00000.pt"
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of the folder"):
        find_checkpoint(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)  # reading one would wait for ever
    with pytest.raises(CheckpointError, match=f"{name} is no file"):
        find_checkpoint(folder)
    (folder / name).unlink()
    good = json.loads((folder / NAME).read_text())
    for outside in ("../../rank_00000.pt", str(tmp_path / name)):
        files = {**good["files"], outside: good["files"][name]}
        old = {key: value for key, value in good.items() if key != "sha256"}
        (folder / NAME).write_text(json.dumps({**old, "files": files}))
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            find_checkpoint(folder)
    for tag in ("../../etc", "/etc", "", "step-000003/../..", "\x00"):
        (folder.parent / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match="does not hold a tag"):
            find_checkpoint(folder.parent / "latest")


def test_archives_that_claim_more_than_they_hold_are_refused(tmp_path):
    torch.save({"state_dict": {"x": torch.zeros(4)}}, tmp_path / "good.pth")
    with zipfile.ZipFile(tmp_path / "good.pth") as good, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for member in good.infolist():
            data = b"\0" * 20_000_000 if member.filename.endswith("/0") else good.read(member)
            bomb.writestr(member.filename, data, compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pth").stat().st_size < 100_000
    with pytest.raises(WeightsError, match="compressed member"):
        read_file(tmp_path / "bomb.pth")
    torch.save({"state_dict": {"x": torch.zeros(1).expand(10**12)}}, tmp_path / "wide.pth")
    with pytest.raises(WeightsError, match="has fewer bytes"):
        read_file(tmp_path / "wide.pth")
    assert len(read_file(tmp_path / "good.pth")[0]) == 1


@pytest.mark.parametrize(
    "header",
    [
        (10**12).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little"),
        (200_000_000).to_bytes(8, "little") + b" " * 1000,
        (20_000).to_bytes(8, "little") + b'{"a":' * 4000,
    ],
)
def test_a_safetensors_header_of_any_size_is_one_sentence(header, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(header)
    with pytest.raises(WeightsError, match="cannot be read as plain tensors"):
        read_file(tmp_path / "x.safetensors")


DEEP = '{"a":' * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize("text", ["[" * 100_000, DEEP, '{"config": ' + "9" * 5000 + "}", '{"a": "\\ud800"}'])
def test_metadata_is_read_within_limits(text, tmp_path):
    save_file({"x": torch.zeros(1)}, str(tmp_path / "x.safetensors"), metadata={META_KEY: text})
    with pytest.raises(WeightsError, match="its metadata"):
        read_file(tmp_path / "x.safetensors")
