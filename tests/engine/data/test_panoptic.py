"""COCO-panoptic as downloaded: read in training as in scoring, and every way it can be broken told in one sentence."""

import copy
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from engine.config.schema import DataConfig, SplitConfig
from engine.data.build import build_data
from engine.data.loader import evaluation_loader, readable
from engine.data.panoptic import IGNORED
from engine.data.panoptic_map import read_ids
from engine.data.shapes import ShapesSettings, write_shapes
from engine.data.shapes_drawing import STUFF, THINGS
from engine.data.types import Classes
from engine.errors import DataError


@pytest.fixture(scope="module")
def shapes():
    return write_shapes(ShapesSettings(train_images=24, val_images=2, image_size=96))


@pytest.fixture
def copied(shapes, tmp_path):
    """The files of `train2017` for spoiling: folder, content, and a function that loads them."""
    shutil.copytree(shapes / "annotations" / "panoptic_train2017", tmp_path / "maps")
    content = json.loads((shapes / "annotations" / "panoptic_train2017.json").read_text())

    def load(**options):
        (tmp_path / "panoptic.json").write_text(json.dumps(content))
        files = SplitConfig(
            annotations=str(tmp_path / "panoptic.json"),
            images=str(shapes / "train2017"),
            panoptic=str(tmp_path / "maps"),
        )
        return build_data(
            DataConfig(task="panoptic", train=files, val=files, scale=[96, 96], flip=0.0, workers=0, **options)
        )

    return tmp_path / "maps", content, load


def test_training_and_scoring_read_the_same_segments(copied):
    maps, content, load = copied
    train, val, classes = load(keep_empty=True)
    assert classes == Classes(
        tuple(c.name for c in THINGS), tuple(c.name for c in STUFF), tuple(c.id for c in THINGS + STUFF)
    )
    assert len(train.dataset) == len(val.dataset) == len(content["images"])
    by_image = {a["image_id"]: a for a in content["annotations"]}
    for index in range(len(train.dataset)):
        sample, truth = train.dataset[index]["data_samples"], val.dataset[index]["data_samples"].truth
        entry = by_image[sample.img_id]
        ids = read_ids(maps / entry["file_name"])
        expected = np.full(ids.shape, IGNORED)
        for segment in entry["segments_info"]:
            expected[ids == segment["id"]] = classes.category_ids.index(segment["category_id"])
        assert (truth.class_map(IGNORED) == expected).all()
        if sample.img_shape == ids.shape:  # 96 pixels already: nothing was resized
            assert (sample.gt_sem_seg.sem_seg[0].numpy() == expected).all()
            objects = [s for s in entry["segments_info"] if s["category_id"] < 91 and not s["iscrowd"]]
            assert [
                [x, y, x + w, y + h] for x, y, w, h in (s["bbox"] for s in objects)
            ] == sample.gt_instances.bboxes.tensor.tolist()
            for mask, segment in zip(sample.gt_instances.masks.masks, objects):
                assert ((ids == segment["id"]) == mask).all()


def test_the_order_of_categories_in_the_file_does_not_matter(copied):
    _, content, load = copied
    _, val, classes = load()
    before = [val.dataset[k]["data_samples"].truth for k in range(3)]
    names = [[classes.all[label] for label in truth.labels] for truth in before]
    content["categories"].reverse()
    _, val, classes = load()
    assert classes.things == tuple(c.name for c in reversed(THINGS)) and len(classes.stuff) == len(STUFF)
    after = [val.dataset[k]["data_samples"].truth for k in range(3)]
    assert [[classes.all[label] for label in truth.labels] for truth in after] == names


def test_images_without_objects_are_left_out_of_training_alone(copied):
    _, content, load = copied
    train, val, _ = load()
    assert len(val.dataset) == len(content["images"]) == len(train.dataset) + 2  # one is empty, one has a crowd only


def test_the_first_images_are_marked_for_drawing(copied):
    _, _, load = copied
    val = load()[1].dataset
    val.shown = 2
    assert [val[k]["data_samples"].shown for k in range(4)] == [True, True, False, False]


def failure_of(load, index=0):
    with pytest.raises(DataError) as error:
        list(readable(evaluation_loader(load()[1].dataset, rank=0, world=1, batch=1, workers=0)))
    return str(error.value)


def test_a_broken_png_is_named(copied):
    maps, content, load = copied
    path = maps / content["annotations"][1]["file_name"]
    whole = Image.open(path).copy()
    path.unlink()
    assert failure_of(load) == f"panoptic PNG {path} does not exist, though {maps.parent / 'panoptic.json'} lists it"
    whole.crop((0, 0, 40, 30)).save(path)
    assert f"panoptic PNG {path} has 40 x 30 pixels, but its image" in failure_of(load)
    path.write_text("no picture")
    assert f"panoptic PNG {path} cannot be read" in failure_of(load)
    odd = np.asarray(whole).copy()
    odd[3, 3] = (1, 2, 3)
    Image.fromarray(odd).save(path)
    assert f"panoptic PNG {path} has pixels of segment 197121, which " in failure_of(load)


def spoil(content, name):
    first = content["annotations"][0]
    if name == "category":
        first["segments_info"][0]["category_id"] = 77
    elif name == "double":
        first["segments_info"].append(copy.deepcopy(first["segments_info"][0]))
    elif name == "bare":
        del first["segments_info"][0]["category_id"]
    elif name == "text":
        first["segments_info"][0] = "sky"
    elif name == "number":
        first["segments_info"][0]["id"] = "7"
    elif name == "list":
        first["segments_info"][0]["category_id"] = [1]
    elif name == "many":
        content["categories"] += [
            {"id": 1000 + n, "name": f"class {n}", "isthing": 0} for n in range(256 - len(content["categories"]))
        ]
    elif name == "instances":
        del first["segments_info"]
        first["category_id"] = 1
    elif name == "unnamed":
        del first["file_name"]
    elif name == "absent":
        content["annotations"].pop(0)
    elif name == "again":
        content["annotations"].append(first)


@pytest.mark.parametrize(
    "name,text",
    [
        ("category", r"annotations\[0\] has a segment of category 77, which is not among the categories"),
        ("double", r"annotations\[0\] has the segment \d+ twice"),
        ("bare", r'has a segment without "category_id"'),
        ("text", r"""annotations\[0\] has a segment that is no object with "id" and "category_id": 'sky'"""),
        ("number", r"""annotations\[0\] has a segment whose "id" must be a whole number, got '7'"""),
        ("list", r"""annotations\[0\] has a segment of category \[1\], which is not among the categories"""),
        ("many", r"panoptic.json lists 256 categories, but panoptic training takes at most 255"),
        ("instances", r'panoptic.json is not a panoptic file: annotations\[0\] has no "segments_info"'),
        ("unnamed", r'annotations\[0\] has no "file_name", the name of its PNG'),
        ("absent", r"image \d+.jpg has no segments"),
        ("again", r"annotations\[24\] is the second one of image"),
    ],
)
def test_a_broken_file_is_told_at_the_start(copied, name, text):
    _, content, load = copied
    spoil(content, name)
    with pytest.raises(DataError, match=text) as caught:
        load()
    assert "\n" not in str(caught.value)


def test_as_many_classes_as_a_byte_holds_are_trained_on(copied):
    _, content, load = copied
    spoil(content, "many")
    content["categories"].pop()
    # The file's first stuff behind all others has the highest label.
    content["categories"].append(
        content["categories"].pop(
            next(place for place, category in enumerate(content["categories"]) if not category["isthing"])
        )
    )
    train, _, classes = load()
    assert len(classes.all) == 255
    labels = {int(v) for k in range(6) for v in train.dataset[k]["data_samples"].gt_sem_seg.sem_seg.unique()}
    assert 254 in labels


def test_a_folder_that_is_not_there_is_told_at_the_start(copied):
    maps, _, load = copied
    shutil.rmtree(maps)
    with pytest.raises(DataError, match='the split needs "panoptic", the folder of PNGs'):
        load()


def test_classes_survive_a_weight_file():
    classes = Classes(("cat", "dog"), ("sky",), (3, 9, 200))
    assert Classes.from_meta(json.loads(json.dumps(classes.to_meta()))) == classes
    assert classes.to_meta() == {
        "classes": ["cat", "dog", "sky"],
        "category_ids": [3, 9, 200],
        "thing_classes": ["cat", "dog"],
        "stuff_classes": ["sky"],
    }
    assert set(Classes(("cat",), (), (3,)).to_meta()) == {"classes", "category_ids"}
    # mmdet's files have no ids.
    assert Classes.from_meta({"classes": ("cat", "dog")}) == Classes(("cat", "dog"), (), (1, 2))
    assert Classes.from_meta(
        {"classes": ("cat", "dog", "sky"), "thing_classes": ("cat", "dog"), "stuff_classes": ("sky",)}
    ) == Classes(("cat", "dog"), ("sky",), (1, 2, 3))
