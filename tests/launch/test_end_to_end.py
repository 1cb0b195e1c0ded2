"""Train on two ranks under DeepSpeed's launcher, evaluate, look, and run the saved config again: all real processes."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from forking import Script, environment
from tiny_run import TINY, difference, merged, saved_weights

LAUNCH = Path(__file__).parents[2] / "launch"
# Two steps find nothing that is sure: every box counts, so that there is something to compare and to draw.
EVERY_BOX = {**TINY["detector"]["options"], "test_cfg.score_thr": 0.0, "test_cfg.max_per_img": 20}
CHANGES = {
    "zero_optimization": {"stage": 2},
    "detector": {"options": EVERY_BOX},
    "schedule": {"steps": 2},
    "run": {"eval_interval": None, "checkpoint_interval": None, "draw": 2},
}


def run(*command, folder):
    """A launch script in a forked process; what it printed."""
    process = Script(*command, folder=folder)
    assert process.wait(300) == 0, process.stdout + process.stderr
    return process.stdout


def under_deepspeed(*command, folder):
    """A launch script on two ranks, started by DeepSpeed's launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [Path(sys.executable).with_name("deepspeed"), "--num_accelerators", 2, "--master_port", port]
    done = subprocess.run(
        [sys.executable, *map(str, launcher), *map(str, command)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def by_hand(*command, folder):
    """The same without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = dict(WORLD_SIZE="2", LOCAL_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [Script(*command, folder=folder, RANK=str(rank), LOCAL_RANK=str(rank), **where) for rank in (0, 1)]
    for rank in ranks:
        assert rank.wait(300) == 0, rank.stdout + rank.stderr
    return ranks[0].stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.json").write_text(json.dumps(merged(CHANGES)))
    command = (LAUNCH / "train.py", "--deepspeed_config", "tiny.json", "--work-dir", "work")
    output = under_deepspeed(*command, folder=folder)  # paths are relative to where the user stands
    return folder, output


@pytest.fixture(scope="module")
def followed(trained, tmp_path_factory):
    """Evaluation, inference and repetition, from another folder."""
    folder, _ = trained
    checkpoint = folder / "work" / "checkpoints" / "step-000002"
    shapes = json.loads((folder / "work" / "config.json").read_text())["data"]["shapes"]
    from engine.data.shapes import ShapesSettings, write_shapes

    photos = sorted((write_shapes(ShapesSettings(**shapes)) / "val2017").iterdir())[:2]
    (folder / "photos").mkdir()
    for photo in photos:
        (folder / "photos" / photo.name).write_bytes(photo.read_bytes())
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    saved, photographs = folder / "work" / "config.json", folder / "photos"
    infer = (checkpoint, photographs, "--out", folder / "found", "--score", "0.0")
    return folder, {
        "again": by_hand(
            LAUNCH / "train.py", "--deepspeed_config", saved, "--work-dir", folder / "again", folder=elsewhere
        ),
        "evaluate": run(LAUNCH / "evaluate.py", checkpoint, "--out", folder / "scored", folder=elsewhere),
        "infer": run(LAUNCH / "infer.py", *infer, folder=elsewhere),
    }


def read(path):
    return json.loads(path.read_text())


def records(work_dir):
    lines = [json.loads(line) for line in (work_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "data_seconds", "images_per_second", "memory_gb")}
        for line in lines
    ]


def test_a_run_leaves_its_records_and_shows_a_table(trained):
    folder, output = trained
    work = folder / "work"
    assert {
        "config.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "eval.json",
        "results.bbox.json",
        "curves.png",
        "predictions.png",
        "checkpoints",
    } <= {p.name for p in work.iterdir()}
    assert [r["step"] for r in records(work)] == [1, 2] and all(0 < r["loss"] < 1e3 for r in records(work))
    assert re.search(r"^\s+mAP\s+mAP_50\s+mAP_75", output, re.MULTILINE) and "ZeRO-2" in output
    assert "4 = 1 x 2 accumulated x 2 ranks" in output
    assert all(-1 <= value <= 1 for value in read(work / "eval.json").values())
    assert {p.name for p in (work / "checkpoints").iterdir()} == {"step-000002", "latest", "best"}
    assert (work / "predictions.png").read_bytes()[:4] == (work / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_the_saved_config_repeats_the_run_bit_for_bit(followed):
    folder, _ = followed
    assert records(folder / "again") == records(folder / "work")
    assert read(folder / "again" / "eval.json") == read(folder / "work" / "eval.json")
    assert difference(*(saved_weights(folder / name)[0] for name in ("work", "again"))) == 0
    first, second = (read(folder / name / "config.json") for name in ("work", "again"))
    assert first["run"].pop("work_dir") == str(folder / "work") and second["run"].pop("work_dir") == str(
        folder / "again"
    )
    assert first == second


def by_image(results):
    return sorted(results, key=lambda r: (r["image_id"], -r["score"], r["category_id"]))


def test_evaluating_the_checkpoint_on_one_rank_gives_the_runs_numbers(followed):
    folder, output = followed
    run_metrics, metrics = read(folder / "work" / "eval.json"), read(folder / "scored" / "eval.json")
    assert metrics == pytest.approx(run_metrics, abs=1e-6)
    assert "mAP_50" in output["evaluate"]
    theirs, ours = (by_image(read(folder / name / "results.bbox.json")) for name in ("work", "scored"))
    assert len(ours) == len(theirs) == 5 * 20
    for mine, other in zip(ours, theirs):
        assert mine["image_id"] == other["image_id"] and mine["score"] == pytest.approx(other["score"], abs=1e-5)
    assert sum(r["bbox"][2] * r["bbox"][3] for r in ours) == pytest.approx(
        sum(r["bbox"][2] * r["bbox"][3] for r in theirs), rel=1e-4
    )


def test_inference_draws_every_image_and_writes_results_with_names(followed):
    import cv2

    folder, output = followed
    photos = sorted((folder / "photos").iterdir())
    results = read(folder / "found" / "results.json")
    assert {p.name for p in (folder / "found").iterdir()} == {"results.json"} | {f"{p.stem}.png" for p in photos}
    assert {r["file_name"] for r in results} == {p.name for p in photos} and len(results) == 2 * 20
    assert "40 objects with a score of at least 0 on 2 images" in output["infer"]
    content = saved_weights(folder / "work")[1]
    names = dict(zip(content["dataset_meta"]["category_ids"], content["dataset_meta"]["classes"]))
    assert all(r["category"] == names[r["category_id"]] and len(r["bbox"]) == 4 for r in results)
    # The very objects that the run's evaluation found on these images (COCO's file names are image ids).
    evaluated = read(folder / "work" / "results.bbox.json")
    for photo in photos:
        ours = sorted(r["score"] for r in results if r["file_name"] == photo.name)
        assert ours == pytest.approx(
            sorted(r["score"] for r in evaluated if r["image_id"] == int(photo.stem)), abs=1e-5
        )
        drawn, plain = cv2.imread(str(folder / "found" / f"{photo.stem}.png")), cv2.imread(str(photo))
        factor = drawn.shape[0] // plain.shape[0]
        assert drawn.shape[:2] == (plain.shape[0] * factor, plain.shape[1] * factor)
        enlarged = cv2.resize(plain, drawn.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        assert (drawn != enlarged).any(-1).mean() > 0.02  # something is drawn on it
