"""Out and in again: exported files in mmdet's own API, the universal format in DeepSpeed's loader and in ours."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

import pytest
import torch
from resumed_run import BATCH_NORM, same, settings
from tiny_run import merged, saved_weights, train_tiny

from engine.checkpoints.finding import find_checkpoint
from engine.errors import CheckpointError
from engine.inference.export import export_universal, export_weights

EVERY_BOX = {**BATCH_NORM["detector"]["options"], "test_cfg.score_thr": 0.0, "test_cfg.max_per_img": 20}
SCORED = {"detector": {"options": EVERY_BOX}, "run": {"eval_interval": None, "draw": 0}}
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def runs(ranks):
    """A scored run at each stage, on two ranks, with batch norm (buffers) and averages."""
    return {stage: ranks.run(train_tiny, 2, settings("AdamW", stage, **SCORED))[0] for stage in STAGES}


def read(path):
    return json.loads(Path(path).read_text())


def by_image(results: list[dict]) -> dict[int, list[dict]]:
    images: dict[int, list[dict]] = {}
    for entry in results:
        images.setdefault(entry["image_id"], []).append(entry)
    return images


@pytest.mark.parametrize("stage", STAGES)
def test_mmdets_own_api_finds_the_same_objects(runs, stage, tmp_path):
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from mmdet.apis import inference_detector, init_detector

    outcome = runs[stage]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        files = export_weights(outcome["folder"], tmp_path / "detector.pth")
        model = init_detector(str(tmp_path / "detector.py"), str(tmp_path / "detector.pth"), device="cpu")
    assert files == [tmp_path / "detector.pth", tmp_path / "detector.py"]
    assert model.dataset_meta["classes"][:2] == ["disk", "square"]
    assert "custom_imports" not in (tmp_path / "detector.py").read_text()
    config = read(Path(outcome["folder"]) / "config.json")
    from engine.data.shapes import ShapesSettings, write_shapes

    images = write_shapes(ShapesSettings(**config["data"]["shapes"])) / "val2017"
    scored = by_image(read(Path(outcome["folder"]) / "results.bbox.json"))
    assert len(scored) == 5
    for image_id, wanted in scored.items():
        found = inference_detector(model, str(images / f"{image_id:012d}.jpg")).pred_instances
        wanted = sorted(wanted, key=lambda entry: -entry["score"])
        assert found.scores.sort(descending=True).values.tolist() == pytest.approx(
            [e["score"] for e in wanted], abs=1e-7
        )
        ours = sorted(([x, y, x + w, y + h] for x, y, w, h in (e["bbox"] for e in wanted)))
        torch.testing.assert_close(
            torch.tensor(sorted(found.bboxes.tolist())), torch.tensor(ours), rtol=1e-6, atol=1e-4
        )


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_holds_the_runs_weights_and_buffers(runs, stage, tmp_path):
    outcome = runs[stage]
    for name in ("a.pth", "a.safetensors"):
        export_weights(outcome["folder"], tmp_path / name)
        tensors, meta = saved_weights(tmp_path / name)
        assert same({key: value.float() for key, value in tensors.items()}, outcome["weights"])
        assert meta["step"] == 6 and meta["dataset_meta"]["classes"][0] == "disk" and meta["config"]["run"]["seed"] == 3
    export_weights(outcome["folder"], tmp_path / "half.safetensors", dtype="bfloat16")
    half = saved_weights(tmp_path / "half.safetensors")[0]
    weight, counter = "bbox_head.retina_cls.weight", "backbone.bn1.num_batches_tracked"
    assert half[weight].dtype == torch.bfloat16 and half[weight].equal(outcome["weights"][weight].bfloat16())
    assert half["backbone.bn1.running_mean"].dtype == torch.float32 and half[counter].dtype == torch.int64
    export_weights(outcome["folder"], tmp_path / "ema.pth", ema=True)
    average = saved_weights(tmp_path / "ema.pth")[0]
    assert same(average, saved_weights(outcome["folder"], ema=True)[0])
    assert not average[weight].equal(outcome["weights"][weight])


def score(checkpoint: str) -> dict[str, float]:
    from engine.inference.evaluate import evaluate
    from engine.inference.load import load_model

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return evaluate(load_model(checkpoint, None, []), "val", Path(tempfile.mkdtemp(prefix="gigadet-run-")))


def scores(checkpoints: list[str]) -> list[dict[str, float]]:
    return [score(checkpoint) for checkpoint in checkpoints]


def test_work_dir_step_universal_and_file_score_what_the_run_did(ranks, runs, tmp_path):
    outcome = runs[3]
    with contextlib.redirect_stdout(io.StringIO()):
        export_universal(outcome["folder"], tmp_path / "universal")
        export_weights(str(tmp_path / "universal"), tmp_path / "from_universal.safetensors")
        export_weights(outcome["folder"], tmp_path / "plain.pth")
    sources = [
        outcome["folder"],
        f"{outcome['folder']}/checkpoints/step-000006",
        f"{outcome['folder']}/checkpoints/best",
        *(str(tmp_path / name) for name in ("universal", "from_universal.safetensors", "plain.pth")),
    ]
    for found in ranks.run(scores, 2, sources)[0]:
        assert found == pytest.approx(outcome["metrics"], abs=1e-6)


def go_on(changes: dict, folder: str) -> dict:
    from engine import distributed

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    return train_tiny(changes, work_dir=work_dir, resume=folder)


def stopped(changes: dict) -> dict:
    return train_tiny(changes, stop_after=4)


@pytest.mark.parametrize("optimizer, stage", [("AGVMSGD", 2), ("AdamW", 3), ("SGD", 0)])
def test_a_universal_folder_is_resumed_bit_for_bit(ranks, optimizer, stage, tmp_path):
    changes = settings(optimizer, stage)
    straight, part = ranks.run(train_tiny, 2, changes)[0], ranks.run(stopped, 2, changes)[0]
    with contextlib.redirect_stdout(io.StringIO()):
        export_universal(part["folder"], tmp_path / "universal")
    moved = ranks.run(go_on, 2, changes, str(tmp_path / "universal"))[0]
    assert same(straight["weights"], moved["weights"]) and straight["mu"] == moved["mu"]
    assert same(saved_weights(straight["folder"], ema=True)[0], saved_weights(moved["folder"], ema=True)[0])
    assert [record["step"] for record in moved["records"]] == [5, 6]  # records stay with the work dir


def loaded_by_deepspeed(changes: dict, folder: str) -> dict:
    """The universal folder through DeepSpeed's own loader, into an engine of ours."""
    from engine import distributed
    from engine.recipes.load import parse_config
    from engine.train.build import build_run
    from engine.zero.stored import WEIGHTS

    work_dir = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    universal = {"checkpoint": {"load_universal": True}, "run": {"work_dir": work_dir}}
    with contextlib.redirect_stdout(io.StringIO()):
        run = build_run(parse_config(merged(universal, changes)))
    path = Path(folder)
    run.engine.load_checkpoint(str(path.parent), tag=path.name)
    layout = run.layout
    from engine.checkpoints.saving import parameter_names

    names = parameter_names(run.engine.module, layout)
    checkpoint = find_checkpoint(folder)
    worst = 0.0
    for fragment in layout.held():
        shard, length = layout.shard(fragment), fragment.stop - fragment.start
        state = run.optimizer.state[shard]
        for key in (WEIGHTS, "exp_avg", "exp_avg_sq"):
            values = shard if key == WEIGHTS else state[key]
            mine = values.detach().view(-1)[fragment.offset : fragment.offset + length]
            theirs = checkpoint.read(names[fragment.param], key, fragment.start, fragment.stop)
            worst = max(worst, float((mine - theirs).abs().max()))
    steps = {int(run.optimizer.state[shard]["step"]) for shard in layout.shards().values()}
    result = {"worst": worst, "steps": steps, "global_steps": run.engine.global_steps}
    run.engine.destroy()
    return result


def test_deepspeeds_own_loader_takes_the_universal_folder(ranks, runs, tmp_path):
    with contextlib.redirect_stdout(io.StringIO()):
        export_universal(f"{runs[2]['folder']}/checkpoints/step-000006", tmp_path / "universal")
    # DeepSpeed reads every file of a parameter's folder as a moment: averages are ours alone.
    for path in (tmp_path / "universal" / "zero").glob("*/ema.pt"):
        path.unlink()
    manifest = read(tmp_path / "universal" / "manifest.json")
    manifest["files"] = {name: record for name, record in manifest["files"].items() if not name.endswith("/ema.pt")}
    del manifest["sha256"]  # as in a folder of an older version
    (tmp_path / "universal" / "manifest.json").write_text(json.dumps(manifest))
    for found in ranks.run(
        loaded_by_deepspeed, 1, settings("AdamW", 2, **SCORED, schedule={"steps": 9}), str(tmp_path / "universal")
    ):
        assert found == {"worst": 0.0, "steps": {6}, "global_steps": 6}


def test_what_cannot_be_exported_is_said(runs, tmp_path):
    with pytest.raises(CheckpointError, match="must end in .pth or .safetensors"):
        export_weights(runs[0]["folder"], tmp_path / "a.onnx")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(CheckpointError, match="not empty"):
        export_universal(runs[0]["folder"], tmp_path / "full")
    with contextlib.redirect_stdout(io.StringIO()):
        export_universal(runs[0]["folder"], tmp_path / "universal")
    with pytest.raises(CheckpointError, match="universal format already"):
        export_universal(str(tmp_path / "universal"), tmp_path / "again")


def without_average(changes: dict) -> str:
    return train_tiny(merged({"run": {"ema": None}}, changes))["folder"]


def test_averaged_weights_are_not_made_up(ranks, tmp_path):
    folder = ranks.run(without_average, 1, settings("SGD", 0, schedule={"steps": 1, "warmup_steps": 0}))[0]
    with pytest.raises(CheckpointError, match="holds no averaged weights: train with run.ema"):
        export_weights(folder, tmp_path / "a.pth", ema=True)
