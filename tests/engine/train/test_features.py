"""Options of the loop: each does what it says and leaves the mathematics alone."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from resumed_run import BATCH_NORM
from tiny_run import difference, distance, merged, saved_weights, train_tiny


def runs(cases):
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on most CPUs, for it is slow there; torch computes it all the same.
    get_accelerator().is_fp16_supported = lambda: True
    return [train_tiny(changes) for changes in cases]


@pytest.fixture(scope="module")
def plain(ranks):
    return ranks.run(runs, 2, [{}])[0][0]


def test_bf16_and_fp16_follow_fp32_loosely(ranks, plain):
    cases = [{"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)]
    cases += [
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": stage}}
        for stage in (1, 2, 3)
    ]
    for case, result in zip(cases, ranks.run(runs, 2, cases)[0]):
        for mine, exact in zip(result["records"], plain["records"]):
            assert mine["loss"] == pytest.approx(exact["loss"], rel=0.03), case
        assert distance(plain["weights"], result["weights"]) < 0.01, case


def test_recomputed_blocks_give_the_same_weights_and_statistics(ranks):
    recompute = {"detector": {**BATCH_NORM["detector"], "checkpoint_activations": ["backbone", "neck"]}}
    cases = [
        BATCH_NORM,
        recompute,
        merged({"zero_optimization": {"stage": 2}}, recompute),
        merged({"zero_optimization": {"stage": 3}}, recompute),
    ]
    expected, *others = ranks.run(runs, 2, cases)[0]
    for result in others:
        assert difference(expected["weights"], result["weights"]) < 1e-5


def test_synchronised_batch_norm_makes_two_ranks_one(ranks):
    """Four images as one micro-batch on one rank, or as two on each of two ranks: the same statistics."""
    # All images padded to one size, for padding counts in the statistics.
    same_size = {"options": {**BATCH_NORM["detector"]["options"], "data_preprocessor.pad_size_divisor": 96}}
    whole = {
        "train_micro_batch_size_per_gpu": 4,
        "data": {"train_scales": None},
        "detector": same_size,
        "schedule": {"steps": 1},
    }  # one step: the loss itself is normalised by the objects of a micro-batch
    halves = merged({"train_micro_batch_size_per_gpu": 2, "detector": {"sync_bn": True}}, whole)
    one = ranks.run(runs, 1, [whole])[0][0]
    two, apart = ranks.run(runs, 2, [halves, merged({"detector": {"sync_bn": False}}, halves)])[0]
    statistics = {n: v for n, v in one["weights"].items() if "running" in n}
    assert len(statistics) > 10
    assert difference(statistics, {n: two["weights"][n] for n in statistics}) < 1e-5
    assert difference(statistics, {n: apart["weights"][n] for n in statistics}) > 1e-3


def test_ranks_score_and_save_the_mean_of_their_statistics(ranks):
    alone = ranks.run(runs, 2, [BATCH_NORM])
    first, second = (rank[0]["weights"] for rank in alone)
    name = next(n for n in first if n.endswith("running_mean"))
    assert not torch.equal(first[name], second[name])
    joined = ranks.run(runs, 2, [merged({"run": {"checkpoint_interval": None}}, merged(BATCH_NORM))])
    saved = saved_weights(joined[0][0]["folder"])[0]
    torch.testing.assert_close(saved[name], (first[name] + second[name]) / 2)
    scored = ranks.run(runs, 2, [merged({"run": {"eval_interval": None, "draw": 0}}, merged(BATCH_NORM))])
    for rank in scored:
        torch.testing.assert_close(rank[0]["weights"][name], saved[name])


def test_a_model_built_partitioned_starts_from_the_same_weights(ranks):
    stage3 = {"zero_optimization": {"stage": 3}}
    plain, partitioned = ranks.run(runs, 2, [stage3, {**stage3, "detector": {"zero_init": True}}])[0]
    assert difference(plain["weights"], partitioned["weights"]) < 1e-6


def test_frozen_parameters_stay(ranks, plain):
    frozen = {"detector": {"frozen": ["backbone", "neck.lateral_convs"]}}
    still, far = ranks.run(
        runs,
        2,
        [
            {**frozen, "zero_optimization": {"stage": 2}},
            {**frozen, "zero_optimization": {"stage": 3}, "schedule": {"steps": 1}},
        ],
    )[0]
    same = [n for n in still["weights"] if torch.equal(still["weights"][n], far["weights"][n])]
    assert sorted(same) == sorted(n for n in still["weights"] if n.startswith(("backbone.", "neck.lateral_convs.")))


def test_weights_are_saved_loaded_and_dropped_by_shape(ranks, tmp_path):
    from engine.inference.export import export_weights

    saved = ranks.run(runs, 2, [{"run": {"checkpoint_interval": None}, "zero_optimization": {"stage": 3}}])[0][0]
    file = Path(saved["folder"]) / "checkpoints" / "step-000003"
    export_weights(str(file), tmp_path / "exported.pth")
    content = torch.load(tmp_path / "exported.pth", weights_only=True)
    assert content["meta"]["dataset_meta"]["classes"][0] == "disk"
    assert difference(saved["weights"], content["state_dict"]) == 0
    content["state_dict"]["bbox_head.retina_cls.weight"] = torch.zeros(3, 16, 3, 3)
    torch.save(content, tmp_path / "other.pth")
    still = {"optimizer": {"params": {"lr": 0.0}}, "schedule": {"steps": 1}}
    load = {**still, "detector": {"load_from": str(file)}}
    dropped = {**still, "detector": {"load_from": str(tmp_path / "other.pth"), "drop_mismatched": True}}
    loaded, partitioned, partly = ranks.run(
        runs,
        2,
        [
            load,
            {**load, "detector": {**load["detector"], "zero_init": True}, "zero_optimization": {"stage": 3}},
            dropped,
        ],
    )[0]
    assert difference(saved["weights"], loaded["weights"]) == 0
    assert difference(saved["weights"], partitioned["weights"]) == 0
    changed = [n for n in saved["weights"] if not torch.equal(saved["weights"][n], partly["weights"][n])]
    assert changed == ["bbox_head.retina_cls.weight"]


def test_monitors_of_deepspeed_get_every_step(ranks, tmp_path):
    case = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "tb"},
    }
    losses = [record["loss"] for record in ranks.run(runs, 2, [case])[0][0]["records"]]
    lines = (tmp_path / "csv" / "train_loss.csv").read_text().splitlines()
    assert [float(line.split(",")[1]) for line in lines[1:]] == pytest.approx(losses)
    assert list(tmp_path.glob("tb/events*"))


def test_non_finite_losses_stop_the_run_on_every_rank(ranks):
    answers = ranks.run(diverge, 2)
    for text in answers:
        assert "not finite in 2 optimizer steps in a row" in text and "images [" in text and "loss_cls" in text


def diverge():
    from engine.errors import UserError

    try:
        train_tiny(
            {
                "optimizer": {"params": {"lr": 1e12}},
                "schedule": {"steps": 8, "warmup_steps": 0},
                "run": {"max_nonfinite": 2},
            }
        )
    except UserError as error:
        return str(error)
    return "no error"


def test_a_non_finite_loss_in_an_earlier_micro_batch_of_one_rank_stops_the_run_too(ranks):
    for text in ranks.run(diverge_in_first_micro_batch, 2):
        assert "not finite in 2 optimizer steps in a row" in text and "rank 1" in text and "nan" in text


def diverge_in_first_micro_batch():
    """On rank 1, in the first of the two micro-batches of every step."""
    from unittest.mock import patch

    from mmdet.models.detectors import SingleStageDetector

    from engine import distributed
    from engine.errors import UserError

    compute, calls = SingleStageDetector.loss, itertools.count()

    def broken(model, *args):
        losses = compute(model, *args)
        factor = float("nan") if distributed.rank() == 1 and next(calls) % 2 == 0 else 1.0
        return {name: [part * factor for part in parts] for name, parts in losses.items()}

    with patch.object(SingleStageDetector, "loss", broken):
        try:
            train_tiny({"schedule": {"steps": 8}, "run": {"max_nonfinite": 2}})
        except UserError as error:
            return str(error)
    return "no error"


def test_a_run_whose_last_losses_were_not_finite_is_no_success(ranks, tmp_path):
    for text in ranks.run(diverge_at_the_end, 2, str(tmp_path / "run")):
        first, again = text
        assert (
            "not finite in the last 1 optimizer steps of the run" in first and "images [" in first and "rank 1" in first
        )
        assert "not finite in the last 1 optimizer steps of the run" in again  # also if it is only looked at again


def diverge_at_the_end(folder: str) -> list[str]:
    """On rank 1, in the last of three steps; then the finished run is resumed."""
    from unittest.mock import patch

    from mmdet.models.detectors import SingleStageDetector

    from engine import distributed
    from engine.errors import UserError

    compute, calls = SingleStageDetector.loss, itertools.count()

    def broken(model, *args):
        losses = compute(model, *args)
        factor = float("nan") if distributed.rank() == 1 and next(calls) == 5 else 1.0
        return {name: [part * factor for part in parts] for name, parts in losses.items()}

    said = []
    for resume in (None, ""):
        with patch.object(SingleStageDetector, "loss", broken):
            try:
                case = {"schedule": {"steps": 3}, "run": {"eval_interval": 0, "checkpoint_interval": None}}
                train_tiny(case, work_dir=folder, resume=resume)
                said.append("no error")
            except UserError as error:
                said.append(str(error))
    return said


def test_a_broken_image_is_named_on_every_rank(ranks, tmp_path):
    for answer in ranks.run(with_broken_image, 2, str(tmp_path)):
        assert "broken.jpg cannot be loaded" in answer


def with_broken_image(folder):
    import shutil
    from unittest.mock import patch

    from engine import distributed
    from engine.data.shapes import ShapesSettings, write_shapes
    from engine.errors import UserError

    root = write_shapes(ShapesSettings(train_images=10, val_images=5, image_size=96))
    copy = Path(folder) / "data"
    if distributed.rank() == 0:
        shutil.copytree(root, copy)
        path = copy / "annotations" / "instances_train2017.json"
        content = json.loads(path.read_text())
        annotated = {a["image_id"] for a in content["annotations"]}
        image = [i for i in content["images"] if i["id"] in annotated][-1]
        image["file_name"] = "broken.jpg"
        (copy / "train2017" / "broken.jpg").write_bytes(b"not a picture")
        path.write_text(json.dumps(content))
    distributed.barrier()
    split = lambda name: {"annotations": f"annotations/instances_{name}2017.json", "images": f"{name}2017"}  # noqa: E731
    try:
        with patch("engine.data.coco.check_sample"):  # which finds it at the start, in small data sets
            train_tiny(
                {
                    "data": {"dataset": "coco", "root": str(copy), "train": split("train"), "val": split("val")},
                    "schedule": {"steps": 12},
                }
            )
    except UserError as error:
        return str(error)
    return "no error"
