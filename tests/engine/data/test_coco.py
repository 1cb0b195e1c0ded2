"""COCO-style data: odd files are read as COCO training reads them, bad ones are told in one sentence."""

import copy
import json

import numpy as np
import pytest
import torch

from engine.config.schema import DataConfig, SplitConfig
from engine.data.annotation_file import read_annotations
from engine.data.build import build_data
from engine.data.coco import check_same_classes, landscape_flags, read_classes
from engine.data.loader import training_loader
from engine.data.order import SampleKey
from engine.data.types import Classes
from engine.errors import DataError

# pycocotools 2.0.11 on numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
CATEGORIES = [{"id": 40, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 90, "name": "emu"}]
SQUARE = [[8.0, 8.0, 28.0, 8.0, 28.0, 28.0, 8.0, 28.0]]
WHOLE_CROWD = {"size": [48, 64], "counts": [0, 48 * 64]}


def box(image, category=7, bbox=(8, 8, 20, 20), **more):
    return {"image_id": image, "category_id": category, "bbox": list(bbox), **more}


def complete(number, annotation):
    x, y, w, h = annotation["bbox"]
    return {"id": number, "area": w * h, "iscrowd": 0, "segmentation": SQUARE, **annotation}


# Ids with gaps and out of order: 5 plain, 900 crowd only, 31 empty, 12 a box without area, 77 two classes and a crowd.
IMAGES = [5, 900, 31, 12, 77]
ANNOTATIONS = [
    box(77, 90),
    box(5, 40, (0, 0, 30, 12)),
    box(900, iscrowd=1, segmentation=WHOLE_CROWD),
    box(12, bbox=(4, 4, 0, 9)),
    box(77, 7, (1, 2, 9, 9)),
    box(77, iscrowd=1, segmentation=WHOLE_CROWD),
    box(5, 40, (70, 50, 10, 10)),
]  # the last one lies outside its image


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import cv2

    path = tmp_path_factory.mktemp("coco")
    (path / "images").mkdir()
    noise = np.random.default_rng(0)
    for image in IMAGES:
        height, width = (64, 48) if image == 31 else (48, 64)
        cv2.imwrite(str(path / "images" / f"{image}.png"), noise.integers(0, 255, (height, width, 3), dtype=np.uint8))
    return path


def content_of(annotations=ANNOTATIONS, images=IMAGES, categories=CATEGORIES):
    entries = [
        {"id": i, "file_name": f"{i}.png", "height": 64 if i == 31 else 48, "width": 48 if i == 31 else 64}
        for i in images
    ]
    return copy.deepcopy(
        {
            "images": entries,
            "categories": categories,
            "annotations": [complete(n, a) for n, a in enumerate(annotations, 100)],
        }
    )


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def data_config(folder, train, val=None, **options):
    files = {
        "train": SplitConfig(annotations=write(folder / "train.json", train), images=str(folder / "images")),
        "val": SplitConfig(annotations=write(folder / "val.json", val or train), images=str(folder / "images")),
    }
    return DataConfig(**files, scale=[64, 64], workers=0, **options)


def instances(dataset):
    """Image id -> (box, label, crowd) of everything that is loaded."""
    return {
        info["img_id"]: [(i["bbox"], i["bbox_label"], i["ignore_flag"]) for i in info["instances"]]
        for info in (dataset.get_data_info(n) for n in range(len(dataset)))
    }


def test_odd_images_and_boxes_are_read_as_mmdet_reads_coco(folder):
    """Against mmdet's own CocoDataset on the same file."""
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from mmdet.datasets import CocoDataset

    for keep_empty in (False, True):
        data = data_config(folder, content_of(), keep_empty=keep_empty)
        train, _, classes = build_data(data)
        theirs = CocoDataset(
            ann_file=data.train.annotations,
            metainfo=dict(classes=classes.all),
            pipeline=[],
            data_prefix=dict(img=data.train.images),
            filter_cfg=dict(filter_empty_gt=not keep_empty, min_size=0),
        )
        ours = instances(train.dataset)
        reread = instances(theirs)
        # mmdet's labels follow the order of the file's ids, ours the order of its names: compare by name.
        # mmdet keeps an image whose only box it leaves out; here it counts as one without objects.
        assert reread[12] == [] and (12 in ours) == (31 in ours) == keep_empty
        assert {k: sorted(v) for k, v in ours.items()} == {
            k: sorted((b, classes.category_ids.index(theirs.cat_ids[label]), crowd) for b, label, crowd in v)
            for k, v in reread.items()
            if k in ours
        }
        assert ours.keys() | {12} == reread.keys()
        assert ours[900] == [([8, 8, 28, 28], 1, 1)] and len(ours[5]) == 1 and len(ours[77]) == 3


def test_crowd_only_and_empty_images_become_samples_without_objects(folder):
    train, val, _ = build_data(data_config(folder, content_of(), keep_empty=True, task="instance"))
    assert len(train.dataset) == len(val.dataset) == 5
    found = {}
    for index in range(5):
        sample = train.dataset[index]["data_samples"]
        found[sample.img_id] = (len(sample.gt_instances), len(sample.ignored_instances), len(sample.gt_instances.masks))
    assert found == {5: (1, 0, 1), 900: (0, 1, 0), 31: (0, 0, 0), 12: (0, 0, 0), 77: (2, 1, 2)}


def test_validation_keeps_every_image(folder):
    _, val, _ = build_data(data_config(folder, content_of()))
    assert sorted(instances(val.dataset)) == sorted(IMAGES)


def test_annotations_without_area_crowd_flag_or_box_are_taken(folder):
    whole, bare = content_of(), content_of()
    for annotation in bare["annotations"]:
        for key in ("area", "id", *([] if annotation["iscrowd"] else ["iscrowd"])):
            del annotation[key]
    bare["annotations"].insert(2, {"image_id": 31, "category_id": 7})  # a region without a box trains nothing
    expected, _, _ = build_data(data_config(folder, whole))
    train, _, _ = build_data(data_config(folder, bare))
    assert instances(train.dataset) == instances(expected.dataset)


def test_labels_follow_the_training_file_although_validation_numbers_them_otherwise(folder):
    train = content_of()
    val = content_of(categories=[{"id": 3, "name": "emu"}, {"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}])
    renumber = {40: 1, 7: 2, 90: 3}
    for annotation in val["annotations"]:
        annotation["category_id"] = renumber[annotation["category_id"]]
    trained, validated, classes = build_data(data_config(folder, train, val, keep_empty=True))
    assert classes == Classes(("cat", "dog", "emu"), (), (40, 7, 90))
    assert instances(trained.dataset) == instances(validated.dataset)
    assert instances(validated.dataset)[5] == [([0, 0, 30, 12], 0, 0)]


def test_class_mismatch_names_the_odd_one():
    train = Classes(("cat", "dog"), (), (1, 2))
    with pytest.raises(DataError, match='class "bird" is in the validation annotations but not in the training ones'):
        check_same_classes(train, Classes(("dog", "cat", "bird"), (), (1, 2, 3)), "val.json")
    with pytest.raises(DataError, match='class "cat" is in the training annotations but not in the validation ones'):
        check_same_classes(train, Classes(("dog",), (), (1,)), "val.json")


def test_things_come_before_stuff():
    content = {"categories": [{"id": 1, "name": "sky", "isthing": 0}, {"id": 2, "name": "cat", "isthing": 1}]}
    assert read_classes(content, panoptic=True) == Classes(("cat",), ("sky",), (2, 1))
    assert read_classes(content, panoptic=False) == Classes(("sky", "cat"), (), (1, 2))


def without(content, key, place, field):
    del content[key][place][field]
    return content


def replaced(content, **changes):
    return {**content, **changes}


@pytest.mark.parametrize(
    "content,words",
    [
        ('{"images": [', r"is not JSON: .* at line 1"),
        ("[]", 'has no list "images"'),
        (replaced(content_of(), categories={}), 'has no list "categories"'),
        (replaced(content_of(), images=[]), "lists no images"),
        (replaced(content_of(), categories=[]), "lists no categories"),
        (without(content_of(), "images", 1, "file_name"), r'images\[1\] has no "file_name"'),
        (without(content_of(), "images", 0, "height"), r'images\[0\] has no "height"'),
        (without(content_of(), "annotations", 2, "image_id"), r'annotations\[2\] has no "image_id"'),
        (without(content_of(), "annotations", 2, "category_id"), r'annotations\[2\] has no "category_id"'),
        (replaced(content_of(), categories=[7]), r'categories\[0\] has no "id"'),
        (
            replaced(content_of(), annotations=[box(5, bbox=(1, 2, 3))]),
            r"annotations\[0\].bbox must be \[x, y, width, height\]",
        ),
        (content_of(images=[5, 12, 5]), "the id 5 stands twice in images"),
        (content_of(categories=[*CATEGORIES, {"id": 8, "name": "dog"}]), "the name 'dog' stands twice in categories"),
    ],
)
def test_a_malformed_annotation_file_is_told_in_one_sentence(tmp_path, content, words):
    path = write(tmp_path / "train.json", content)
    with pytest.raises(DataError, match=words) as caught:
        read_annotations(path)
    assert path in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_unreadable_annotation_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.json does not exist: check data.root"):
        read_annotations(str(tmp_path / "nowhere.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="binary.json cannot be read"):
        read_annotations(str(tmp_path / "binary.json"))


def refusal(data):
    with pytest.raises(DataError) as caught:
        build_data(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_trained_on_is_refused(folder):
    boxes = content_of()
    for annotation in boxes["annotations"]:
        del annotation["segmentation"]
    some = content_of()
    some["annotations"][4]["segmentation"] = []
    assert 'has no masks (no "segmentation"): use data.task "detection"' in refusal(
        data_config(folder, boxes, task="instance")
    )
    assert "1 annotations of" in refusal(data_config(folder, some, task="instance"))
    assert "annotations[4]" in refusal(data_config(folder, some, task="instance"))
    assert "set data.keep_empty to true" in refusal(data_config(folder, content_of(annotations=[])))
    assert "6.png does not exist, though" in refusal(data_config(folder, content_of(images=[6, 5])))
    elsewhere = data_config(folder, content_of())
    elsewhere = elsewhere.model_copy(update={"val": elsewhere.val.model_copy(update={"images": str(folder / "no")})})
    assert "image folder" in refusal(elsewhere)


def test_an_empty_training_set_is_trained_on_where_asked(folder):
    train, _, _ = build_data(data_config(folder, content_of(annotations=[]), keep_empty=True))
    assert len(train.dataset) == 5


def test_orientation_is_that_of_the_image(folder):
    train, _, _ = build_data(data_config(folder, content_of(), keep_empty=True))
    flags = dict(zip((train.dataset.get_data_info(n)["img_id"] for n in range(5)), landscape_flags(train.dataset)))
    assert flags == {5: True, 900: True, 31: False, 12: True, 77: True}


AUGMENTED = dict(
    train_scales=[[48, 48], [96, 96]],
    flip=0.5,
    keep_empty=True,
    augmentation=[{"type": "RandomCrop", "crop_size": [32, 32]}, {"type": "PhotoMetricDistortion"}],
)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_belongs_to_the_key_not_to_order_or_worker(folder, workers):
    train, _, _ = build_data(data_config(folder, content_of(), **AUGMENTED))
    keys = [SampleKey(epoch, position, position % 5) for epoch in (0, 1) for position in range(8)]

    def load(micro_batches, seed=0, workers=0):
        loader = training_loader(train.dataset, seed, micro_batches, workers=workers)
        samples = {}
        for batch, chunk in zip(loader, micro_batches):
            samples.update(zip(chunk, batch["inputs"]))
        return samples

    one_by_one = load([[key] for key in keys])
    backwards = list(reversed(keys))
    in_threes = load([backwards[i : i + 3] for i in range(0, len(keys), 3)], workers=workers)
    assert one_by_one.keys() == in_threes.keys()
    assert all(torch.equal(one_by_one[key], in_threes[key]) for key in keys)
    # The same image at another position, in another epoch or under another seed looks different.
    first = one_by_one[keys[0]]
    others = [one_by_one[SampleKey(0, 5, 0)], one_by_one[SampleKey(1, 0, 0)], load([keys[:1]], seed=1)[keys[0]]]
    assert not any(other.shape == first.shape and torch.equal(other, first) for other in others)


def test_objects365_as_unpacked_is_found_below_its_patches(folder, tmp_path):
    """Its file says images/v1/patch8/NAME.jpg, its archives unpack to patch8/NAME.jpg."""
    import shutil

    content = content_of()
    for number, image in enumerate(content["images"]):
        patch = f"patch{number % 2}"
        (tmp_path / "train" / patch).mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "images" / image["file_name"], tmp_path / "train" / patch)
        image["file_name"] = f"images/v{1 + number % 2}/{patch}/{image['file_name']}"
    # Three that its file lists are in no archive; one of them may be the first.
    for place, name in (
        (0, "v2/patch16/objects365_v2_00908726.jpg"),
        (3, "v1/patch6/objects365_v1_00320532.jpg"),
        (7, "v1/patch6/objects365_v1_00320534.jpg"),
    ):
        content["images"].insert(place, {**content["images"][0], "id": 1000 + place, "file_name": f"images/{name}"})
        content["annotations"].append(complete(1000 + place, box(1000 + place)))
    files = SplitConfig(
        annotations=write(tmp_path / "zhiyuan_objv2_train.json", content), images=str(tmp_path / "train")
    )
    train, val, _ = build_data(DataConfig(train=files, val=files, scale=[64, 64], workers=0))
    assert len(val.dataset) == 5 and all(val.dataset[k]["inputs"].shape[0] == 3 for k in range(5))
    assert len(train.dataset) == len(build_data(data_config(folder, content_of()))[0].dataset)
    assert val.content["images"][1]["file_name"] == "patch1/900.png"
    assert {annotation["image_id"] for annotation in val.content["annotations"]} <= set(IMAGES)
    # Names that lead to images are left alone, however deep.
    content = content_of()
    for image in content["images"]:
        (tmp_path / "deep" / "a" / "b").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "images" / image["file_name"], tmp_path / "deep" / "a" / "b")
        image["file_name"] = f"a/b/{image['file_name']}"
    files = SplitConfig(annotations=write(tmp_path / "deep.json", content), images=str(tmp_path / "deep"))
    assert build_data(DataConfig(train=files, val=files, workers=0))[1].content["images"][0]["file_name"] == "a/b/5.png"
