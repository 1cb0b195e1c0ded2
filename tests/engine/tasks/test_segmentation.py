"""Semantic and panoptic runs: one rank scores as two, checkpoints tell things from stuff, maps are drawn."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import distance, merged, saved_weights, train_tiny

from engine.data.panoptic_map import PanopticMap, read_ids
from engine.errors import ConfigError, DataError
from engine.recipes.load import parse_config

THIN = {
    "backbone.base_channels": 8,
    "backbone.norm_cfg": {"type": "GN", "num_groups": 4},
    "neck.in_channels": [8, 16, 32, 64],
    "neck.out_channels": 16,
}
THIN_SEMANTIC = {
    **THIN,
    "semantic_head.in_channels": 16,
    "semantic_head.inner_channels": 16,
    "semantic_head.norm_cfg.num_groups": 4,
}
THIN_ROI = {
    "rpn_head.in_channels": 16,
    "rpn_head.feat_channels": 16,
    "roi_head.bbox_head.in_channels": 16,
    "roi_head.bbox_roi_extractor.out_channels": 16,
    "roi_head.bbox_head.fc_out_channels": 32,
    "roi_head.mask_roi_extractor.out_channels": 16,
    "roi_head.mask_head.in_channels": 16,
    "roi_head.mask_head.conv_out_channels": 16,
    "roi_head.mask_head.num_convs": 1,
    "train_cfg.rpn_proposal.nms_pre": 100,
    "train_cfg.rpn_proposal.max_per_img": 50,
    "test_cfg.rpn.nms_pre": 100,
    "test_cfg.rpn.max_per_img": 20,
}
# Untrained, a detector is sure of nothing: every object counts, and stuff of any size.
UNSURE = {"test_cfg.rcnn.score_thr": 0.0, "test_cfg.rcnn.max_per_img": 8, "test_cfg.panoptic.stuff_area_limit": 1}
RUNS = {
    "semantic": ("tiny_semantic_fpn", THIN_SEMANTIC),
    "panoptic": ("tiny_panoptic_fpn", {**THIN_SEMANTIC, **THIN_ROI, **UNSURE}),
}


def changes(task, **more):
    name, options = RUNS[task]
    base = merged(
        {
            "detector": {"config": name, "options": options},
            "data": {"task": task},
            "schedule": {"steps": 2},
            "run": {"eval_interval": None, "checkpoint_interval": None, "draw": 3},
        }
    )
    return merged(more, base)


def trained(task):
    result = train_tiny(changes(task), curves=True)
    return result["metrics"], result["folder"], [record["loss"] for record in result["records"]]


def evaluated(checkpoint, out):
    """What the scripts evaluate and infer do, on this rank's process group."""
    from engine.inference.evaluate import evaluate
    from engine.inference.infer import infer
    from engine.inference.load import load_model

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loaded = load_model(checkpoint, None, [])
        metrics = evaluate(loaded, "val", Path(out) / "scored")
        images = Path(loaded.config.run.work_dir) / "photos"
        if images.is_dir():
            infer(loaded, str(images), Path(out) / "found")
    return metrics, loaded.classes


@pytest.fixture(scope="module", params=list(RUNS))
def run(request, ranks, tmp_path_factory):
    """A run of two ranks, and its checkpoint scored and used by one and by two."""
    import shutil

    from engine.data.shapes import ShapesSettings, write_shapes

    metrics, folder, _ = ranks.run(trained, 2, request.param)[0]
    source = write_shapes(ShapesSettings(train_images=10, val_images=5, image_size=96)) / "val2017"
    (Path(folder) / "photos").mkdir()
    for path in sorted(source.iterdir())[:2]:
        shutil.copy(path, Path(folder) / "photos" / path.name)
    out = tmp_path_factory.mktemp(request.param)
    checkpoint = str(folder)
    one = ranks.run(evaluated, 1, checkpoint, str(out / "one"))[0]
    two = ranks.run(evaluated, 2, checkpoint, str(out / "two"))
    return request.param, Path(folder), metrics, checkpoint, out, one, two


def test_scores_do_not_depend_on_the_number_of_ranks(run):
    task, folder, metrics, _, out, (one, _), two = run
    assert metrics["mIoU" if task == "semantic" else "PQ_st"] >= 0
    assert one == pytest.approx(metrics, abs=1e-6)
    assert all(scored == one for scored, _ in two)
    tables = [
        json.loads((path / "results.classes.json").read_text())
        for path in (folder, out / "one" / "scored", out / "two" / "scored")
    ]
    assert tables[1] == tables[2] and tables[0].keys() == tables[1].keys() and len(tables[0]) >= 4
    assert json.loads((out / "one" / "scored" / "eval.json").read_text()) == one


def test_a_checkpoint_knows_things_from_stuff(run):
    task, _, _, checkpoint, _, (_, classes), _ = run
    names = saved_weights(checkpoint)[1]["dataset_meta"]
    assert tuple(names["classes"]) == classes.all and len(classes.all) == 10
    assert len(classes.stuff) == (4 if task == "panoptic" else 0)
    assert classes.category_ids == (
        (1, 3, 4, 18, 44, 90, 154, 171, 187, 193) if task == "panoptic" else tuple(range(1, 11))
    )


def test_pictures_show_truth_and_prediction(run):
    _, folder, _, _, out, _, _ = run
    for path in (folder / "predictions.png", folder / "curves.png", out / "two" / "scored" / "predictions.png"):
        picture = np.asarray(Image.open(path).convert("RGB"))
        assert picture.shape[1] > 1000 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 500


def test_inference_writes_maps_with_the_data_sets_own_numbers(run):
    task, folder, _, _, out, (_, classes), _ = run
    for ranks_used in ("one", "two"):
        found = out / ranks_used / "found"
        content = json.loads((found / f"{task}.json").read_text())
        assert [c["id"] for c in content["categories"]] == list(classes.category_ids)
        photos = sorted((folder / "photos").iterdir())
        assert [entry["image"] for entry in content["annotations"]] == [photo.name for photo in photos]
        for entry, photo in zip(content["annotations"], photos):
            path = found / task / entry["file_name"]
            numbers = read_ids(path) if task == "panoptic" else np.asarray(Image.open(path))
            assert numbers.shape[::-1] == Image.open(photo).size and (found / f"{photo.stem}.png").is_file()
            key = "id" if task == "panoptic" else "category_id"
            areas = {segment[key]: segment["area"] for segment in entry["segments_info"]}
            shown = dict(zip(*(part.tolist() for part in np.unique(numbers, return_counts=True))))
            shown.pop(0, None)
            assert shown == areas and {s["category_id"] for s in entry["segments_info"]} <= set(classes.category_ids)
    one, two = (out / ranks_used / "found" for ranks_used in ("one", "two"))
    assert (one / f"{task}.json").read_text() == (two / f"{task}.json").read_text()


def weights_and_losses(task, cases):
    results = [train_tiny(changes(task, run={"eval_interval": 0, "checkpoint_interval": 0}, **case)) for case in cases]
    return [(result["weights"], [record["loss"] for record in result["records"]]) for result in results]


@pytest.mark.parametrize("task", list(RUNS))
def test_training_does_not_depend_on_ranks_and_stage(ranks, task):
    ((weights, losses),) = ranks.run(weights_and_losses, 1, task, [{}])[0]
    cases = [{"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}, {"bf16": {"enabled": True}}]
    *exact, half = ranks.run(weights_and_losses, 2, task, cases)[0]
    for other, _ in exact:
        assert distance(weights, other) < 1e-6
    assert half[1] == pytest.approx(losses, rel=0.05)


@pytest.mark.parametrize("task", list(RUNS))
def test_a_run_without_pictures_gathers_no_maps(ranks, task):
    results = ranks.run(gathered_bytes, 2, task)
    with_maps, without = (results[0][draw] for draw in (5, 0))
    assert with_maps > 5 * 500 and without < 5 * 1500 and without < with_maps / 2


def modulated(task):
    """Three steps with a window of AGVM at each, as the shipped configs are switched to it."""
    agvm = {"type": "AGVMAdamW", "params": {"lr": 1e-3, "weight_decay": 0.05, "tau": 1, "start_step": 0}}
    result = train_tiny(
        changes(
            task,
            optimizer=agvm,
            schedule={"steps": 3},
            zero_optimization={"stage": 2},
            run={"eval_interval": 0, "checkpoint_interval": 0},
        )
    )
    return result["records"]


@pytest.mark.parametrize(
    "task,modules",
    [
        ("semantic", {"backbone", "neck", "semantic_head"}),
        ("panoptic", {"backbone", "neck", "rpn_head", "bbox_head", "mask_head", "semantic_head"}),
    ],
)
def test_agvm_sees_the_heads_of_maps_as_modules(ranks, task, modules):
    records = ranks.run(modulated, 2, task)[0]
    assert set(records[-1]["mu"]) == set(records[-1]["phi"]) == modules
    assert records[-1]["mu"]["backbone"] == 1 != records[-1]["mu"]["semantic_head"]


def gathered_bytes(task):
    """Size of what rank 0 gathers in an evaluation, drawn and not."""
    import pickle

    from engine.train import evaluate as report

    sizes = {}
    gather = report.gather_predictions
    for draw in (5, 0):

        def weigh(mine, expected, draw=draw):
            predictions = gather(mine, expected)
            sizes[draw] = len(pickle.dumps(predictions))
            return predictions

        report.gather_predictions = weigh
        try:
            train_tiny(changes(task, schedule={"steps": 1}, run={"draw": draw, "checkpoint_interval": 0}))
        finally:
            report.gather_predictions = gather
    return sizes


def test_the_truth_as_the_models_output_scores_100(tmp_path):
    """Through the task's own code, from the loader's sample to eval.json."""
    from mmengine.structures import PixelData

    from engine.tasks.registry import task_of

    for task_name, name in (("panoptic", "PQ"), ("semantic", "mIoU")):
        task = task_of(parse_config(changes(task_name)))
        _, val, classes = task.build_data()
        predictions = []
        for index in range(len(val.dataset)):
            sample = val.dataset[index]["data_samples"]
            truth = sample.truth
            if task_name == "panoptic":
                codes = np.concatenate([[len(classes.all)], truth.labels + 1000 * np.arange(1, len(truth.labels) + 1)])
                sample.pred_panoptic_seg = PixelData(sem_seg=torch.from_numpy(codes[truth.pixels])[None])
            else:
                sample.pred_sem_seg = PixelData(sem_seg=torch.from_numpy(np.where(truth == 255, 0, truth))[None])
            predictions.append(task.as_numbers(sample, classes))
        assert sum("found" in p for p in predictions) == 3
        metrics = task.write_scores(tmp_path, predictions, val, classes, table=False)
        assert metrics[name] == pytest.approx(100)


def test_maps_survive_packing():
    from engine.tasks.panoptic import Panoptic
    from engine.tasks.semantic import Semantic

    config = parse_config(changes("panoptic"))
    found = PanopticMap(pixels=np.array([[0, 1], [2, 400]], np.int32), labels=np.arange(400), crowd=np.zeros(400, bool))
    back = Panoptic(config).unpack(Panoptic(config).pack(found))
    assert (back.pixels == found.pixels).all() and (back.labels == found.labels).all()
    labels = np.array([[0, 255, 7]], np.uint8)
    assert (Semantic(config).unpack(Semantic(config).pack(labels)) == labels).all()


@pytest.mark.parametrize(
    "task,name,text",
    [
        ("panoptic", "tiny_mask_rcnn", 'data.task is "panoptic" but detector "tiny_mask_rcnn" has no panoptic head'),
        ("semantic", "tiny_mask_rcnn", 'data.task is "semantic" but detector "tiny_mask_rcnn" finds objects'),
        ("instance", "tiny_panoptic_fpn", 'has a panoptic head: set data.task to "panoptic"'),
        ("detection", "tiny_semantic_fpn", 'gives each pixel a class .* set data.task to "semantic"'),
    ],
)
def test_a_detector_of_another_task_is_refused(task, name, text):
    from engine.data.types import Classes
    from engine.tasks.registry import task_of

    config = parse_config(merged({"detector": {"config": name, "options": {}}, "data": {"task": task}}))
    stuff = ("sky",) if task == "panoptic" else ()
    with pytest.raises(ConfigError, match=text):
        task_of(config).build_model(Classes(("a", "b"), stuff, (1, 2, 3)[: 2 + len(stuff)]))


@pytest.mark.parametrize(
    "data,text",
    [
        (
            {"task": "semantic", "dataset": "coco", "train": {"images": "i", "annotations": "a"}},
            'data.task "semantic" cannot be trained on data.dataset "coco"',
        ),
        ({"task": "panoptic", "dataset": "ade20k"}, 'data.task "panoptic" cannot be trained on data.dataset "ade20k"'),
        (
            {"task": "semantic", "dataset": "ade20k"},
            'data.train is missing: give {"annotations": FOLDER, "images": FOLDER}',
        ),
        (
            {"task": "semantic", "dataset": "ade20k", "train": {"images": "i"}},
            'the key "data.train.annotations" is missing',
        ),
        ({"task": "semantic", "group_by_aspect": True}, "data.group_by_aspect is for data sets that list sizes"),
        ({"task": "semantic", "keep_empty": True}, "data.keep_empty is for data sets that list sizes"),
    ],
)
def test_a_data_set_of_another_task_is_refused(data, text):
    with pytest.raises(ConfigError, match=text):
        parse_config(merged({"data": data}))


def test_classes_numbered_otherwise_are_refused(tmp_path):
    """A checkpoint's label k is number k + 1 of the maps: another table would score one class as another."""
    import shutil

    from engine.data.shapes import ShapesSettings, write_shapes
    from engine.tasks.registry import task_of

    root = write_shapes(ShapesSettings(train_images=10, val_images=5, image_size=96)) / "ADEChallengeData2016"
    ade = shutil.copytree(root, tmp_path / "ade")
    splits = {
        name: {"images": str(ade / "images" / folder), "annotations": str(ade / "annotations" / folder)}
        for name, folder in (("train", "training"), ("val", "validation"))
    }
    task = task_of(parse_config(changes("semantic", data={"task": "semantic", "dataset": "ade20k", **splits})))
    classes = task.read_classes()
    assert len(task.build_split("val", classes).dataset) == 5
    swapped = classes._replace(things=(classes.things[1], classes.things[0], *classes.things[2:]))
    with pytest.raises(DataError, match="are numbered otherwise than those of the model"):
        task.build_split("val", swapped)
    with pytest.raises(DataError, match='class "gravel" is in the training annotations but not'):
        task.build_split("val", classes._replace(things=("gravel", *classes.things[1:])))


def test_regions_are_coloured_by_class_and_void_stays():
    from engine.tasks.pictures import draw_regions

    image = np.full((480, 480, 3), 100, np.uint8)
    regions = np.zeros((480, 480), np.int32)
    regions[:, 160:320], regions[:240, 320:], regions[240:, 320:] = 1, 2, 3
    drawn = draw_regions(image, regions, [4, 7, 4], ["x"] * 8)
    assert (drawn[:, :160] == 100).all() and (image == 100).all()
    colour = [tuple(drawn[y, x]) for y, x in ((5, 170), (5, 330), (475, 330))]
    assert colour[0] == colour[2] != colour[1] and (drawn[240, 330:] == 255).all()
