"""Scoring: COCO's figures whichever backend computes them, every image once, the file's own category ids."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from engine.data.cleaning import clean
from engine.data.loader import evaluation_loader, readable
from engine.data.shapes import ShapesSettings, write_shapes
from engine.data.types import Classes
from engine.errors import ConfigError, DataError, UserError
from engine.inference.infer import find_images
from engine.tasks.coco_scores import category_ids_for, coco_results, result_table, score, write_scores
from engine.tasks.detection import draw_beside_truth
from engine.tasks.pictures import drawn_paths
from engine.tasks.predicting import gather_predictions

# pycocotools 2.0.11 on numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
METRICS = ["mAP", "mAP_50", "mAP_75", "mAP_s", "mAP_m", "mAP_l"]


@pytest.fixture(scope="module")
def shapes():
    """Annotations with polygons, run lengths and crowds, images without objects, and category ids with gaps."""
    root = write_shapes(ShapesSettings(train_images=40, val_images=1, image_size=96))
    content = json.loads((root / "annotations" / "instances_train2017.json").read_text())
    renumber = {c["id"]: 5 * c["id"] + 3 for c in content["categories"]}
    for category in content["categories"]:
        category["id"] = renumber[category["id"]]
    for annotation in content["annotations"]:
        annotation["category_id"] = renumber[annotation["category_id"]]
    classes = Classes(
        tuple(c["name"] for c in content["categories"]), (), tuple(c["id"] for c in content["categories"])
    )
    assert any(a["iscrowd"] for a in content["annotations"])
    return root / "train2017", content, classes


def rle_of(annotation, image):
    found = annotation["segmentation"]
    if isinstance(found, list) or isinstance(found["counts"], list):
        found = coco_mask.frPyObjects(found, image["height"], image["width"])
    return coco_mask.merge(found) if isinstance(found, list) else found


def perfect(content, classes):
    """The ground truth in the form that `predict` gives."""
    predictions = []
    for image in content["images"]:
        found = [a for a in content["annotations"] if a["image_id"] == image["id"] and not a["iscrowd"]]
        boxes = np.array([a["bbox"] for a in found], dtype=np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        predictions.append(
            dict(
                image_id=image["id"],
                boxes=boxes,
                scores=np.full(len(found), 0.9, dtype=np.float32),
                labels=np.array([classes.category_ids.index(a["category_id"]) for a in found], dtype=np.int64),
                masks=[rle_of(a, image) for a in found],
            )
        )
    return predictions


def noisy(content, classes):
    """Objects missed, doubled, moved and mislabelled, with scores that mean little."""
    noise = np.random.default_rng(0)
    predictions = perfect(content, classes)
    for prediction in predictions:
        keep = np.flatnonzero(noise.random(len(prediction["boxes"])) < 0.9)
        keep = np.concatenate([keep, keep[:1]])
        boxes = prediction["boxes"][keep] + noise.normal(0, 2, (len(keep), 4)).astype(np.float32)
        labels = prediction["labels"][keep]
        wrong = noise.random(len(keep)) < 0.15
        masks = []
        for k in keep:
            shifted = np.roll(coco_mask.decode(prediction["masks"][k]), noise.integers(-4, 5, 2), (0, 1))
            masks.append(coco_mask.encode(np.asfortranarray(shifted)))
        prediction.update(
            boxes=boxes,
            labels=np.where(wrong, (labels + 1) % len(classes.things), labels),
            masks=masks,
            scores=noise.random(len(keep)).astype(np.float32),
        )
    return predictions


def results_of(predictions, ids):
    return {"bbox": coco_results(predictions, ids, masks=False), "segm": coco_results(predictions, ids, masks=True)}


@pytest.mark.parametrize("backend", ["pycocotools", "faster-coco-eval"])
def test_the_ground_truth_itself_scores_one(shapes, backend):
    _, content, classes = shapes
    before = copy.deepcopy(content)
    metrics, per_class = score(
        content, results_of(perfect(content, classes), classes.category_ids), classes, classes.category_ids, backend
    )
    assert list(metrics) == [f"{kind}_{name}" for kind in ("bbox", "segm") for name in METRICS]
    assert {name: value for name, value in metrics.items() if value != -1} == pytest.approx(
        {name: 1.0 for name, value in metrics.items() if value != -1}
    )
    assert metrics["bbox_mAP"] == metrics["segm_mAP"] == pytest.approx(1)
    assert all(list(per_class[kind]) == list(classes.things) for kind in per_class)
    assert all(value == pytest.approx(1) for kind in per_class for value in per_class[kind].values())
    assert content == before  # scored again and again in a run


def test_both_backends_give_equal_figures_on_imperfect_predictions(shapes):
    _, content, classes = shapes
    answers = [
        score(
            content, results_of(noisy(content, classes), classes.category_ids), classes, classes.category_ids, backend
        )
        for backend in ("pycocotools", "faster-coco-eval")
    ]
    (metrics, per_class), (fast_metrics, fast_per_class) = answers
    assert 0.05 < metrics["bbox_mAP"] < 0.95 and 0.05 < metrics["segm_mAP"] < 0.95
    assert metrics["bbox_mAP"] != metrics["segm_mAP"]
    assert fast_metrics == pytest.approx(metrics, abs=1e-9)
    for kind in per_class:
        assert fast_per_class[kind] == pytest.approx(per_class[kind], abs=1e-9)


@pytest.mark.parametrize("backend", ["pycocotools", "faster-coco-eval"])
def test_finding_nothing_scores_nothing(shapes, backend):
    _, content, classes = shapes
    found = results_of(perfect(content, classes), classes.category_ids)
    metrics, per_class = score(content, {"bbox": found["bbox"], "segm": []}, classes, classes.category_ids, backend)
    assert metrics["bbox_mAP"] == pytest.approx(1)
    assert [metrics[f"segm_{name}"] for name in METRICS] == [0.0] * 6
    assert "segm " in result_table(metrics, per_class)


def test_scores_are_written_under_the_files_own_category_ids(shapes, tmp_path):
    """Validation may number and order the classes otherwise than training: labels mean names."""
    _, content, classes = shapes
    content = copy.deepcopy(content)
    content["categories"].reverse()
    renumber = {c["id"]: 2 * k + 11 for k, c in enumerate(content["categories"])}
    for category in content["categories"]:
        category["id"] = renumber[category["id"]]
    predictions = perfect(content | {"annotations": [dict(a) for a in content["annotations"]]}, classes)
    for annotation in content["annotations"]:
        annotation["category_id"] = renumber[annotation["category_id"]]
    ids = category_ids_for(classes, content)
    assert ids == [renumber[c] for c in classes.category_ids]
    metrics = write_scores(tmp_path, predictions, content, classes, masks=True, backend="pycocotools", table=False)
    assert metrics["bbox_mAP"] == metrics["segm_mAP"] == pytest.approx(1)
    assert json.loads((tmp_path / "eval.json").read_text()) == metrics
    # A label that is wrong throughout costs its class alone, under its name.
    odd = classes.things[0]
    for prediction in predictions:
        prediction["labels"] = np.where(prediction["labels"] == 0, 1, prediction["labels"])
    _, per_class = score(content, {"bbox": coco_results(predictions, ids, masks=False)}, classes, ids, "pycocotools")
    assert per_class["bbox"][odd] == 0 and all(per_class["bbox"][name] == 1 for name in classes.things[2:])


def test_the_results_file_is_in_coco_form(shapes, tmp_path):
    from pycocotools.coco import COCO

    _, content, classes = shapes
    write_scores(tmp_path, perfect(content, classes), content, classes, masks=True, backend="pycocotools", table=False)
    (tmp_path / "truth.json").write_text(json.dumps(content))
    coco = COCO(str(tmp_path / "truth.json"))
    for kind, key in (("bbox", "bbox"), ("segm", "segmentation")):
        entries = json.loads((tmp_path / f"results.{kind}.json").read_text())
        assert set(entries[0]) == {"image_id", "category_id", "score", key}
        loaded = coco.loadRes(str(tmp_path / f"results.{kind}.json"))
        plain = [a for a in content["annotations"] if not a["iscrowd"]]
        assert sorted((a["image_id"], a["category_id"], round(a["area"])) for a in loaded.anns.values()) == sorted(
            (a["image_id"], a["category_id"], round(a["area"] if kind == "segm" else a["bbox"][2] * a["bbox"][3]))
            for a in plain
        )


def test_annotations_without_area_id_or_crowd_flag_are_scored(shapes):
    _, content, classes = shapes
    predictions = noisy(content, classes)
    bare = copy.deepcopy(content)
    for annotation in bare["annotations"]:
        del annotation["id"]
        if not annotation["iscrowd"]:
            del annotation["iscrowd"]
    results = {"bbox": coco_results(predictions, classes.category_ids, masks=False)}
    expected, _ = score(content, copy.deepcopy(results), classes, classes.category_ids, "pycocotools")
    assert score(bare, results, classes, classes.category_ids, "pycocotools")[0] == expected
    for annotation in bare["annotations"]:
        del annotation["area"]
    got, _ = score(
        bare,
        {"bbox": coco_results(predictions, classes.category_ids, masks=False)},
        classes,
        classes.category_ids,
        "pycocotools",
    )
    assert got["bbox_mAP"] == pytest.approx(expected["bbox_mAP"], abs=0.02)  # crowds aside, area decides sizes only


def test_predictions_are_drawn_where_annotations_are_odd(shapes, tmp_path):
    folder, content, classes = shapes
    content = copy.deepcopy(content)
    content["annotations"] += [
        {"image_id": 10**9, "category_id": classes.category_ids[0], "bbox": [1, 1, 5, 5]},
        {"image_id": content["images"][0]["id"], "category_id": 999, "bbox": [1, 1, 5, 5]},
    ]
    draw_beside_truth(
        tmp_path / "p.png",
        perfect(content | {"annotations": content["annotations"][:-2]}, classes),
        clean(content, "val.json", masks=False, training=False)[0],
        folder,
        classes,
        count=2,
    )
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_inference_never_writes_over_an_image(tmp_path):
    for name in ("a.png", "a.jpg", "b.JPG", "note.txt"):
        (tmp_path / name).touch()
    images = find_images(str(tmp_path))
    assert images == [tmp_path / name for name in ("a.jpg", "a.png", "b.JPG")] == find_images(str(tmp_path / "*.*"))
    drawn = drawn_paths(images, tmp_path / "out")
    assert [p.name for p in drawn] == ["0001-a.png", "0002-a.png", "b.png"]
    with pytest.raises(ConfigError, match="would write over the image a.png"):
        drawn_paths(images[1:], tmp_path / "out" / "..")
    for nothing in ("note.txt", "*.gif", "absent"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(DataError, match="is no image, no folder with images"):
            find_images(str(tmp_path / "empty" / nothing))


class Numbers:
    """A data set whose samples are their own numbers."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"inputs": index}


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_every_image_is_loaded_by_exactly_one_rank(size, world, batch):
    shares = [
        [
            index
            for data in evaluation_loader(Numbers(size), rank=rank, world=world, batch=batch, workers=0)
            for index in data["inputs"]
        ]
        for rank in range(world)
    ]
    assert sorted(index for share in shares for index in share) == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


SIZES = (7, 2)


def gather_shares():
    from engine import distributed

    answers = []
    for size in SIZES:
        loader = evaluation_loader(
            Numbers(size), rank=distributed.rank(), world=distributed.world_size(), batch=2, workers=0
        )
        mine = [{"image_id": index} for data in readable(loader) for index in data["inputs"]]
        answers.append(gather_predictions(mine, size))
    return answers


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rank_zero_gathers_every_image_once(ranks, world):
    first, *others = ranks.run(gather_shares, world)
    assert first == [[{"image_id": index} for index in range(size)] for size in SIZES]
    assert others == [[None, None]] * (world - 1)


def test_an_image_scored_twice_or_never_is_an_error():
    once = [{"image_id": 1}, {"image_id": 2}]
    assert gather_predictions(list(reversed(once)), 2) == once
    for predictions in (once + [{"image_id": 2}], once[:1], [{"image_id": 1}] * 2):
        with pytest.raises(UserError, match="expected 2 of 2"):
            gather_predictions(predictions, 2)


def test_an_image_that_cannot_be_loaded_is_named():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index == 3:
                raise FileNotFoundError
            return super().__getitem__(index)

        def get_data_info(self, index):
            return {"img_path": f"/pictures/{index}.jpg"}

    with pytest.raises(DataError, match="image /pictures/3.jpg does not exist"):
        list(readable(evaluation_loader(Broken(5), rank=0, world=1, batch=2, workers=0)))
