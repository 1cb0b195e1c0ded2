"""The shapes data set: readable by the real readers, consistent between its three layouts, and written safely."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import cv2
import forking
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from engine.data import shapes_drawing
from engine.data.shapes import ADE20K_CLASSES, ShapesSettings, polygons, run_lengths, write_shapes
from engine.data.shapes_drawing import STUFF, THINGS

SETTINGS = ShapesSettings(train_images=72, val_images=24)
SPLITS = pytest.mark.parametrize("split", ["train", "val"])
ADE_FOLDER = {"train": "training", "val": "validation"}
CODE = np.array([1, 256, 256 * 256])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_shapes(SETTINGS, tmp_path_factory.mktemp("cache"))


def read_json(folder, kind, split):
    return json.loads((folder / "annotations" / f"{kind}_{split}2017.json").read_text())


def panoptic_map(folder, split, row):
    path = folder / "annotations" / f"panoptic_{split}2017" / row["file_name"]
    return np.asarray(Image.open(path)).astype(int) @ CODE


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def instance_masks(folder, split):
    """`(image_id, [(annotation, decoded mask), ...])` of every image."""
    coco = COCO(str(folder / "annotations" / f"instances_{split}2017.json"))
    for image_id in coco.getImgIds():
        yield image_id, [(row, coco.annToMask(row) > 0) for row in coco.loadAnns(coco.getAnnIds(image_id))]


@SPLITS
def test_instances_decode_to_their_area_and_tight_box(folder, split):
    seen = 0
    for _, rows in instance_masks(folder, split):
        for row, mask in rows:
            ys, xs = np.nonzero(mask)
            x, y, width, height = row["bbox"]
            assert mask.sum() == pytest.approx(row["area"], rel=0.02)
            assert (
                np.abs(
                    np.subtract([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], [x, y, x + width, y + height])
                ).max()
                <= 1
            )
            assert isinstance(row["segmentation"], dict if row["iscrowd"] else list)
            seen += 1
    assert seen > 2 * (SETTINGS.train_images if split == "train" else SETTINGS.val_images)


@SPLITS
def test_images_have_the_size_that_their_rows_say(folder, split):
    shapes = set()
    for row in read_json(folder, "instances", split)["images"]:
        size = Image.open(folder / f"{split}2017" / row["file_name"]).size
        assert size == (row["width"], row["height"]) and max(size) == SETTINGS.image_size
        assert min(size) >= 0.7 * SETTINGS.image_size - 1
        assert row["file_name"] == f"{row['id']:012d}.jpg"
        shapes.add(np.sign(size[0] - size[1]))
    assert {-1, 1} <= shapes


def test_masks_show_the_visible_part_only(folder):
    boxes_overlap = 0
    for _, rows in instance_masks(folder, "train"):
        covered = sum(mask.astype(int) for _, mask in rows)
        assert np.max(covered, initial=0) <= 1
        boxes = [row["bbox"] for row, _ in rows]
        boxes_overlap += coco_mask.iou(boxes, boxes, [0] * len(boxes)).sum() > len(boxes) + 0.01 if boxes else 0
    assert boxes_overlap > 10  # or nothing hides anything and the test above says little


def test_the_labels_show_what_the_picture_shows(monkeypatch):
    # Each shape paints its number in place of a texture, so that the picture itself says who is in front.
    painted = []

    def paint_number(rng, image, alpha, category):
        painted.append(alpha)
        image[alpha > 127] = 1000 + len(painted)

    monkeypatch.setattr(shapes_drawing, "_paint", paint_number)
    monkeypatch.setattr(shapes_drawing, "_expose", lambda rng, image: image)
    for index in range(48):
        scene = shapes_drawing.draw_scene(seed=0, split=0, index=index, image_size=160, max_objects=6)
        shown = scene.image[..., 0]
        thing_labels = [k for k, s in enumerate(scene.segments, start=1) if s.category.isthing]
        is_thing = np.isin(scene.labels, thing_labels)
        assert (shown[is_thing] >= 1000).all() and (shown[(scene.labels > 0) & ~is_thing] < 1000).all()
        numbers = [set(shown[scene.labels == k]) for k in thing_labels]
        assert sum(map(len, numbers)) == len(set().union(*numbers))
        for number, label in zip(numbers, thing_labels):
            if not scene.segments[label - 1].iscrowd:
                (alone,) = number
                visible = scene.labels == label
                # Parts below eight pixels are void, so a little less than the rule's 0.4 may be left.
                assert visible.sum() > 0.35 * (painted[int(alone) - 1001] > 127).sum()
                assert cv2.connectedComponentsWithStats(visible.astype(np.uint8), connectivity=4)[2][1:, 4].min() >= 8


@SPLITS
def test_panoptic_maps_hold_exactly_their_segments(folder, split):
    content = read_json(folder, "panoptic", split)
    known = {category["id"]: category for category in content["categories"]}
    void = total = 0
    for row in content["annotations"]:
        ids = panoptic_map(folder, split, row)
        counts = dict(zip(*(values.tolist() for values in np.unique(ids, return_counts=True))))
        void, total = void + counts.pop(0, 0), total + ids.size
        assert {segment["id"]: segment["area"] for segment in row["segments_info"]} == counts
        stuff = [s["category_id"] for s in row["segments_info"] if not known[s["category_id"]]["isthing"]]
        assert len(stuff) == len(set(stuff)) >= 1
        for segment in row["segments_info"]:
            ys, xs = np.nonzero(ids == segment["id"])
            assert segment["bbox"] == [xs.min(), ys.min(), np.ptp(xs) + 1, np.ptp(ys) + 1]
    assert 0.005 * total < void < 0.05 * total


@SPLITS
def test_thing_segments_are_the_instances(folder, split):
    things = {category.id for category in THINGS}
    panoptic = {row["image_id"]: row for row in read_json(folder, "panoptic", split)["annotations"]}
    for image_id, rows in instance_masks(folder, split):
        ids = panoptic_map(folder, split, panoptic[image_id])
        segments = [s for s in panoptic[image_id]["segments_info"] if s["category_id"] in things]
        assert len(segments) == len(rows)
        for segment, (row, mask) in zip(segments, rows):
            assert all(segment[key] == row[key] for key in ("category_id", "iscrowd", "bbox", "area"))
            other = ids == segment["id"]
            assert (mask & other).sum() / (mask | other).sum() > 0.9


@SPLITS
def test_semantic_maps_are_the_panoptic_ones_by_class(folder, split):
    classes = {category.id: number for number, category in enumerate(ADE20K_CLASSES, start=1)}
    ade = folder / "ADEChallengeData2016"
    for number, row in enumerate(read_json(folder, "panoptic", split)["annotations"], start=1):
        ids = panoptic_map(folder, split, row)
        expected = np.zeros(ids.shape, int)
        for segment in row["segments_info"]:
            expected[ids == segment["id"]] = classes[segment["category_id"]]
        stem = f"ADE_{split}_{number:08d}"
        with Image.open(ade / "annotations" / ADE_FOLDER[split] / f"{stem}.png") as semantic:
            assert semantic.mode == "L"
            np.testing.assert_array_equal(np.asarray(semantic), expected)
        picture = folder / f"{split}2017" / row["file_name"].replace(".png", ".jpg")
        assert (ade / "images" / ADE_FOLDER[split] / f"{stem}.jpg").read_bytes() == picture.read_bytes()


def test_the_class_table_reads_as_ade20k_ships_it(folder):
    head, *rows = (
        line.split("\t") for line in (folder / "ADEChallengeData2016" / "objectInfo150.txt").read_text().splitlines()
    )
    assert head == ["Idx", "Ratio", "Train", "Val", "Name"]
    assert [(int(row[0]), row[4]) for row in rows] == [(k + 1, c.name) for k, c in enumerate(ADE20K_CLASSES)]
    assert 0.95 < sum(float(row[1]) for row in rows) < 1
    assert all(0 < int(row[2]) <= SETTINGS.train_images and 0 < int(row[3]) <= SETTINGS.val_images for row in rows)


def test_ids_have_gaps_and_no_image_is_in_both_splits(folder):
    ids = {split: [row["id"] for row in read_json(folder, "instances", split)["images"]] for split in ("train", "val")}
    for values in ids.values():
        assert values == sorted(set(values)) and len(set(np.diff(values))) > 3 and values[0] > 0
    assert not set(ids["train"]) & set(ids["val"])
    things, stuff = [c.id for c in THINGS], [c.id for c in STUFF]
    assert max(things) - min(things) >= len(things) and max(things) < 91 < min(stuff)
    for kind, expected in (("instances", things), ("panoptic", things + stuff)):
        assert [category["id"] for category in read_json(folder, kind, "val")["categories"]] == expected


@SPLITS
def test_every_kind_of_image_and_class_is_present(folder, split):
    kinds, classes = Counter(), Counter()
    for _, rows in instance_masks(folder, split):
        crowds = sum(row["iscrowd"] for row, _ in rows)
        kinds["empty" if not rows else "plain" if not crowds else "crowd only" if crowds == len(rows) else "both"] += 1
        classes.update(row["category_id"] for row, _ in rows if not row["iscrowd"])
        assert len(rows) - crowds <= SETTINGS.max_objects
    assert set(kinds) == {"empty", "plain", "crowd only", "both"} and kinds["plain"] > sum(kinds.values()) / 2
    assert set(classes) == {category.id for category in THINGS}


def test_holes_and_parts_become_several_polygons_and_decode_exactly():
    mask = np.zeros((40, 50), bool)
    mask[5:30, 5:30] = True
    mask[10:14, 8:12] = mask[20:25, 18:19] = False
    mask[33:38, 40:50] = True
    outlines = polygons(mask)
    assert len(outlines) >= 3
    np.testing.assert_array_equal(coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, 40, 50))), mask)


@pytest.mark.parametrize("first", [False, True])
def test_run_lengths_are_coco_s(first):
    mask = np.zeros((7, 9), bool)
    mask[2:5, 3:8] = True
    mask[0, 0] = mask[-1, -1] = first
    np.testing.assert_array_equal(coco_mask.decode(coco_mask.frPyObjects(run_lengths(mask), 7, 9)), mask)


def test_same_settings_write_the_same_bytes_and_another_seed_does_not(tmp_path):
    one, two, other = (
        files(write_shapes(ShapesSettings(train_images=6, val_images=2, seed=seed), tmp_path / name))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert one == two
    pictures = {content for name, content in one.items() if name.endswith(".jpg")}
    assert len(pictures) == 8 and not pictures & set(other.values())


def test_an_image_does_not_depend_on_how_many_there_are(tmp_path):
    few, many = (write_shapes(ShapesSettings(train_images=count, val_images=1), tmp_path) for count in (5, 10))
    few_files, many_files = files(few), files(many)
    images = [name for name in few_files if name.endswith((".jpg", ".png"))]
    assert len(images) == 6 * 4 and all(few_files[name] == many_files[name] for name in images)
    for kind in ("instances", "panoptic"):
        rows, more = (read_json(path, kind, "train")["annotations"] for path in (few, many))
        assert 5 <= len(rows) < len(more) and more[: len(rows)] == rows


def test_a_finished_data_set_is_reused_and_found_through_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GIGADET_CACHE", str(tmp_path))
    settings = ShapesSettings(train_images=2, val_images=1)
    folder = write_shapes(settings)
    assert folder.parent == tmp_path
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert write_shapes(settings) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def write_at_once(root, gate, answers):
    gate.wait()
    answers.put(str(write_shapes(ShapesSettings(train_images=24, val_images=4), Path(root))))


def test_two_processes_that_race_both_get_the_one_data_set(tmp_path):
    context = forking.context()
    gate, answers = context.Barrier(2), context.Queue()
    processes = [context.Process(target=write_at_once, args=(str(tmp_path), gate, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    folder = Path(answers.get(timeout=5))
    assert answers.get(timeout=5) == str(folder)
    assert list(tmp_path.iterdir()) == [folder] and len(list((folder / "train2017").iterdir())) == 24


def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path):
    settings = ShapesSettings(train_images=300, val_images=1, image_size=64)
    program = (
        "import sys; from pathlib import Path; from engine.data.shapes import ShapesSettings, write_shapes; "
        "write_shapes(ShapesSettings(train_images=300, val_images=1, image_size=64), Path(sys.argv[1]))"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[3])
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob(".*/train2017/*.jpg"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(writer.pid, signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and (left[0] / "train2017").is_dir()
    assert len(list((write_shapes(settings, tmp_path) / "train2017").iterdir())) == 300


def test_an_unwritable_cache_is_one_sentence_with_the_way_out(tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with pytest.raises(OSError, match="cannot write the shapes data set to .*a file.*set GIGADET_CACHE"):
        write_shapes(ShapesSettings(train_images=1, val_images=1), blocked)


@pytest.mark.parametrize(
    "name, value",
    [
        ("train_images", 0),
        ("val_images", -1),
        ("image_size", 63),
        ("image_size", 160.0),
        ("max_objects", 0),
        ("max_objects", 51),
        ("seed", -1),
        ("seed", True),
    ],
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number in \d+\.\.\d+, got {value}$"):
        ShapesSettings(**{name: value})


def mmdet_data(folder, split, kind):
    from mmdet.datasets import CocoDataset, CocoPanopticDataset

    import models  # noqa: F401  (makes mmdet importable without mmcv's compiled ops)

    names = {"things": tuple(c.name for c in THINGS), "stuff": tuple(c.name for c in STUFF)}
    images = f"{split}2017/"
    if kind == "instances":
        return CocoDataset(
            ann_file=f"annotations/instances_{split}2017.json",
            data_root=str(folder),
            data_prefix={"img": images},
            metainfo={"classes": names["things"]},
        )
    return CocoPanopticDataset(
        ann_file=f"annotations/panoptic_{split}2017.json",
        data_root=str(folder),
        data_prefix={"img": images, "seg": f"annotations/panoptic_{split}2017/"},
        metainfo={
            "classes": names["things"] + names["stuff"],
            "thing_classes": names["things"],
            "stuff_classes": names["stuff"],
        },
    )


@SPLITS
def test_mmdet_reads_the_instances(folder, split):
    data, content = mmdet_data(folder, split, "instances"), read_json(folder, "instances", split)
    rows = Counter((row["image_id"], row["category_id"], row["iscrowd"]) for row in content["annotations"])
    items = [data.get_data_info(k) for k in range(len(data))]
    assert len(items) == len(content["images"]) and all(Path(item["img_path"]).is_file() for item in items)
    assert (
        Counter(
            (item["img_id"], THINGS[i["bbox_label"]].id, i["ignore_flag"]) for item in items for i in item["instances"]
        )
        == rows
    )


@SPLITS
def test_mmdet_reads_the_panoptic_segments(folder, split):
    data, content = mmdet_data(folder, split, "panoptic"), read_json(folder, "panoptic", split)
    expected = {
        row["image_id"]: Counter((s["id"], s["category_id"]) for s in row["segments_info"])
        for row in content["annotations"]
    }
    items = [data.get_data_info(k) for k in range(len(data))]
    assert all(Path(item["seg_map_path"]).is_file() for item in items)
    assert {
        item["img_id"]: Counter((s["id"], (THINGS + STUFF)[s["category"]].id) for s in item["segments_info"])
        for item in items
    } == expected
