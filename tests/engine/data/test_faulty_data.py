"""Data that is not what it should be: told at the start, refused where nothing is left, and scored as it was meant."""

import copy
import json
import random
import re

import cv2
import numpy as np
import pytest
from annotation_mutants import IMAGES, sound_content, write_images
from PIL import Image

from engine.config.schema import DataConfig, SplitConfig
from engine.data.build import build_data
from engine.data.classification import list_objects
from engine.errors import DataError
from engine.tasks.coco_scores import write_scores

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools 2.0.11 on numpy 2


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    write_images(path)
    return path


@pytest.fixture
def load(images, tmp_path):
    def build(train=None, val=None, **options):
        files = {}
        for name, content in (("train", train), ("val", val)):
            (tmp_path / f"{name}.json").write_text(json.dumps(content or sound_content()))
            files[name] = SplitConfig(annotations=str(tmp_path / f"{name}.json"), images=str(images))
        return build_data(DataConfig(**files, scale=[64, 64], workers=0, **options))

    return build


def changed(change, content=None):
    """The sound file with every annotation changed."""
    content = content or sound_content()
    for annotation in content["annotations"]:
        change(annotation)
    return content


def normalise(annotation):
    (width, height), (x, y, w, h) = IMAGES[annotation["image_id"]], annotation["bbox"]
    annotation["bbox"] = [x / width, y / height, w / width, h / height]


def as_corners(annotation):
    x, y, w, h = annotation["bbox"]
    annotation["bbox"] = [x, y, x + w, y + h]


@pytest.mark.parametrize(
    "change,words",
    [
        (normalise, r"of \d+ boxes lie between 0 and 1 and look normalised, but COCO's are in pixels"),
        (as_corners, r"look like \[x1, y1, x2, y2\]"),
        (lambda a: a.update(area=0), 'none of its 21 boxes can be trained on: 21 of area 0 .*; remove "area"'),
        (lambda a: a.update(iscrowd=1), 'can be trained on: 21 are crowds: set "iscrowd" to 0'),
        (
            lambda a: a.update(category_id=0),
            r"21 of an unknown category .* are 7, 1, 90, the anno.* 0$",
        ),
        (
            lambda a: a.update(image_id=6),
            r"21 of an unknown image .* are 5, 1, 31, ..., the anno.* 6$",
        ),
        (lambda a: a.update(bbox=[500, 3, 9, 9]), "21 outside the image .* mixed up"),
        (lambda a: a.pop("bbox"), '21 without a "bbox" '),
    ],
)
@pytest.mark.parametrize("keep_empty", [False, True])
def test_a_training_file_of_which_nothing_is_left_is_refused(load, change, words, keep_empty):
    with pytest.raises(DataError, match=words) as caught:
        load(train=changed(change), keep_empty=keep_empty)
    assert "train.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [normalise, as_corners, lambda a: a.update(iscrowd=1), lambda a: a.pop("bbox")])
def test_a_validation_file_that_cannot_be_scored_is_refused_before_training(load, change):
    with pytest.raises(DataError, match="val.json"):
        load(val=changed(change))


def test_true_boxes_near_the_corner_of_small_images_are_not_taken_for_corners(load):
    """All boxes are wider than they are far from the left, but none reaches beyond its image."""
    train, _, _ = load(train=changed(lambda a: a.update(bbox=[2, 2, 30, 30])))
    assert sum(len(train.dataset.get_data_info(k)["instances"]) for k in range(len(train.dataset))) == 21


def test_every_object_that_is_left_out_is_told_by_reason_with_an_example(load, tmp_path, capsys):
    content = sound_content()
    faulty = [a for a in content["annotations"] if not a.get("iscrowd")]
    faulty[0]["category_id"] = faulty[1]["category_id"] = 999
    faulty[2]["image_id"] = 999
    faulty[3]["bbox"][0] = float("nan")
    faulty[4]["bbox"][2] = -4
    faulty[5]["bbox"][:2] = [500, 500]
    faulty[6]["bbox"][3] = 0.5
    faulty[7]["iscrowd"] = "no"
    faulty[8]["area"] = 0
    content["annotations"].append(copy.deepcopy(faulty[9]))
    faulty[10]["bbox"][2] += 40
    faulty[11]["id"] = faulty[12]["id"]
    load(train=content)
    told = capsys.readouterr().out.splitlines()

    def example(k):
        return f"(image {faulty[k]['image_id']}, annotation {faulty[k]['id']})"

    assert len(told) == 3
    assert told[0] == f"data    of 22 boxes of {tmp_path.name}/train.json left out: " + ", ".join(
        [
            f"2 of an unknown category {example(0)}",
            f"1 given twice with the same id {example(9)}",
            f"1 of an unknown image {example(2)}",
            f"1 whose iscrowd or ignore is neither 0 nor 1 {example(7)}",
            f"1 with NaN, infinite or huge numbers {example(3)}",
            f"1 of negative width or height {example(4)}",
            f"1 outside the image {example(5)}",
            f"1 less than a pixel wide or high {example(6)}",
            f"1 of area 0 {example(8)}",
        ]
    )
    assert "1 annotations share their id" in told[1] and "numbered anew" in told[1]
    assert f"beyond their image by more than a pixel: 1 {example(10)}" in told[2]


def test_a_sound_file_is_read_without_a_word(load, capsys):
    load(task="instance")
    assert capsys.readouterr().out == ""


def perfect(content):
    """Predictions that find every object that is no crowd."""
    labels = {category["id"]: label for label, category in enumerate(content["categories"])}
    found = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        if not annotation.get("iscrowd"):
            found[annotation["image_id"]].append(annotation)
    return [
        dict(
            image_id=image,
            boxes=np.array([[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in objects)]).reshape(-1, 4),
            scores=np.full(len(objects), 0.9),
            labels=np.array([labels[a["category_id"]] for a in objects], int),
        )
        for image, objects in found.items()
    ]


def ap(load, folder, val, predictions):
    _, split, classes = load(val=val)
    metrics = write_scores(folder, predictions, split.content, classes, masks=False, backend="pycocotools", table=False)
    return metrics["bbox_mAP"]


def test_annotation_ids_do_not_change_the_score(load, tmp_path):
    """COCO's evaluation finds objects by id, and takes the id 0 for no object."""
    sound = sound_content()
    assert ap(load, tmp_path, sound, perfect(sound)) == pytest.approx(1)
    for change in (
        lambda a: a.update(id=1),
        lambda a: a.update(id=0),
        lambda a: a.update(id=(a["id"] - 100) // 3),
        lambda a: a.update(id=f"no {a['id'] % 4}"),
    ):
        assert ap(load, tmp_path, changed(change), perfect(sound)) == pytest.approx(1)


def test_a_validation_file_with_faulty_objects_is_scored_without_them(load, tmp_path):
    sound = sound_content()
    plain = [k for k, a in enumerate(sound["annotations"]) if not a.get("iscrowd")]
    faulty, cleaned = sound_content(), copy.deepcopy(sound)
    del faulty["annotations"][plain[0]]["bbox"]
    faulty["annotations"][plain[1]]["iscrowd"] = "0"
    faulty["annotations"][plain[2]]["area"] = "large"
    faulty["annotations"][plain[3]]["bbox"][1] = float("nan")
    faulty["annotations"].append(copy.deepcopy(faulty["annotations"][plain[5]]))
    cleaned["annotations"] = [a for k, a in enumerate(sound["annotations"]) if k not in plain[:4]]
    assert ap(load, tmp_path, faulty, perfect(cleaned)) == pytest.approx(1)
    some = perfect(cleaned)
    some[2] = {**some[2], "boxes": some[2]["boxes"] + 5.0}
    assert ap(load, tmp_path, faulty, some) == ap(load, tmp_path, cleaned, some) < 1


@pytest.mark.parametrize(
    "mask,reason",
    [
        ({"size": [64, 48], "counts": [0, 64 * 48]}, "with a run-length mask that does not fit the image"),
        ({"size": [48, 64], "counts": [0, 64 * 48 + 1]}, "with a run-length mask that does not fit the image"),
        ({"size": [48, 64], "counts": "0PQ4"}, "with a (run-length mask that does not fit|malformed mask)"),
        ({"size": [48, 64], "counts": [64 * 48]}, "with an empty mask"),
        ([[3, 3, 20, 20]], "with a polygon of fewer than 3 points"),
        ([[3, 3, 1e9, 20, 9, 9]], "with a polygon far outside the image"),
        ([[3, 3, 20, 20, float("nan"), 9]], "with a malformed mask"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_mask_that_cannot_be_used_is_left_out_and_told(load, capsys, split, mask, reason):
    content = sound_content()
    annotation = next(a for a in content["annotations"] if a["image_id"] == 5 and not a.get("iscrowd"))
    annotation["segmentation"] = mask
    load(**{split: content}, task="instance")
    told = capsys.readouterr().out
    assert f"/{split}.json left out: 1 " in told and f"annotation {annotation['id']})" in told
    assert re.search(reason, told)
    load(**{split: content})  # boxes alone are sound
    assert capsys.readouterr().out == ""


def test_sizes_are_those_of_the_image_files(load, images, tmp_path):
    content = sound_content()
    image = content["images"][3]
    image["width"], image["height"] = image["height"], image["width"]
    for split in ("train", "val"):
        with pytest.raises(DataError, match=r"900.png has 66 x 44 pixels, but .*\.json says 44 x 66; .*data.py check"):
            load(**{split: content})


def test_an_image_is_as_large_as_its_orientation_shows_it(tmp_path):
    """OpenCV, which loads the images, turns a photograph as its EXIF says."""
    from engine.data.image_files import image_size

    photo = Image.fromarray(np.zeros((20, 30, 3), np.uint8))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", exif=exif)
    assert image_size(tmp_path / "turned.jpg") == cv2.imread(str(tmp_path / "turned.jpg")).shape[1::-1] == (20, 30)


def test_a_missing_or_broken_image_of_the_sample_is_named(load, images, tmp_path):
    content = sound_content()
    content["images"][-1]["file_name"] = "absent.png"
    with pytest.raises(DataError, match="absent.png does not exist, though"):
        load(val=content)
    content["images"][-1]["file_name"] = "broken.png"
    (images / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken.png cannot be read \(it is not an image\)"):
        load(val=content)


def test_a_byte_order_mark_is_read(images, tmp_path):
    (tmp_path / "bom.json").write_text(json.dumps(sound_content()), encoding="utf-8-sig")
    files = SplitConfig(annotations=str(tmp_path / "bom.json"), images=str(images))
    train, _, _ = build_data(DataConfig(train=files, val=files, workers=0))
    assert len(train.dataset) == 7


def test_objects_that_are_cut_out_are_cleaned_too(images, tmp_path, capsys):
    content = sound_content()
    place = next(k for k, a in enumerate(content["annotations"]) if not a.get("iscrowd"))
    content["annotations"][place]["bbox"][0] = float("nan")
    del content["annotations"][place + 1]["bbox"]
    (tmp_path / "train.json").write_text(json.dumps(content))
    listing, _ = list_objects(SplitConfig(annotations=str(tmp_path / "train.json"), images=str(images)))
    crowds = sum(1 for a in content["annotations"] if a.get("iscrowd"))
    assert len(listing.names) == len(content["annotations"]) - crowds - 2
    assert f"of 21 boxes of {tmp_path.name}/train.json left out: " in capsys.readouterr().out


JUNK = [None, True, -1, 0, 2, 0.5, float("nan"), 10**30, "", "x", "a\0b", "\ud800", [], [1], {}, {"id": 1}]


def test_a_panoptic_file_with_any_value_replaced_is_read_or_refused(tmp_path, exhaustive):
    """Without a traceback; which of both is right is tested in test_panoptic.py."""
    from engine.data.shapes import ShapesSettings, write_shapes

    shapes = write_shapes(ShapesSettings(train_images=4, val_images=2, image_size=64))
    sound = json.loads((shapes / "annotations" / "panoptic_train2017.json").read_text())
    noise, outcomes = random.Random(7), {"read": 0, "refused": 0}
    for _ in range(1000 if exhaustive else 120):
        content = copy.deepcopy(sound)
        node = content
        key = noise.choice(["images", "annotations", "annotations", "categories"])
        while isinstance(node[key], (list, dict)) and node[key] and noise.random() < 0.9:
            node = node[key]
            key = noise.randrange(len(node)) if isinstance(node, list) else noise.choice(list(node))
        node[key] = noise.choice(JUNK)
        (tmp_path / "panoptic.json").write_text(json.dumps(content))
        files = SplitConfig(
            annotations=str(tmp_path / "panoptic.json"),
            images=str(shapes / "train2017"),
            panoptic=str(shapes / "annotations" / "panoptic_train2017"),
        )
        try:
            train, val, _ = build_data(DataConfig(task="panoptic", train=files, val=files, keep_empty=True, workers=0))
            assert len(train.dataset) == len(val.dataset) == 4
            outcomes["read"] += 1
        except DataError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_a_wrong_crowd_flag_of_a_segment_is_refused(tmp_path):
    from engine.data.shapes import ShapesSettings, write_shapes

    shapes = write_shapes(ShapesSettings(train_images=4, val_images=2, image_size=64))
    content = json.loads((shapes / "annotations" / "panoptic_train2017.json").read_text())
    content["annotations"][1]["segments_info"][0]["iscrowd"] = "0"
    (tmp_path / "panoptic.json").write_text(json.dumps(content))
    files = SplitConfig(
        annotations=str(tmp_path / "panoptic.json"),
        images=str(shapes / "train2017"),
        panoptic=str(shapes / "annotations" / "panoptic_train2017"),
    )
    with pytest.raises(DataError, match=r"annotations\[1\] has a segment whose iscrowd must be 0 or 1, got '0'"):
        build_data(DataConfig(task="panoptic", train=files, val=files, workers=0))


def test_class_maps_without_a_class_are_refused(tmp_path):
    from tiny_run import merged

    from engine.recipes.load import parse_config
    from engine.tasks.registry import task_of

    splits = {}
    for split, value in (("train", 3), ("val", 255)):
        for kind, picture in (
            ("images", np.zeros((32, 40, 3), np.uint8)),
            ("maps", np.full((32, 40), value, np.uint8)),
        ):
            (tmp_path / kind / split).mkdir(parents=True)
            for number in range(3):
                cv2.imwrite(str(tmp_path / kind / split / f"{number}.png"), picture)
        splits[split] = {"images": f"images/{split}", "annotations": f"maps/{split}"}
    data = {"dataset": "ade20k", "task": "semantic", "root": str(tmp_path), **splits}
    config = parse_config(merged({"detector": {"config": "tiny_semantic_fpn", "options": {}}, "data": data}))
    with pytest.raises(DataError, match="maps/val: in none of 3 of them has a pixel a class"):
        task_of(config).build_data()
