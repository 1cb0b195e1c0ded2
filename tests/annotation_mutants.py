"""Faulty annotation files, each with what must become of it, said beforehand by the fault and not by the reader.

`mutants(seed, count)` yields files made from a small sound one. A mutant is either refused (`cleaned` is None) or read
exactly as its `cleaned` file: the one that a careful user would have written.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from pycocotools import mask as coco_mask

Content = dict[str, Any]
SPLITS, TASKS = ("train", "val"), ("detection", "instance")
# Ids with gaps, among them 1, which Python takes for true; sizes that differ in both sides.
IMAGES = {5: (64, 48), 1: (48, 64), 31: (70, 50), 900: (66, 44), 12: (52, 68), 77: (64, 40), 8: (72, 54), 40: (46, 60)}
CATEGORIES = {7: "dog", 1: "cat", 90: "emu"}


def sound_content() -> Content:
    """Two to four objects in every image but one, with crowds in both run-length forms."""
    noise = random.Random(0)
    content: Content = {
        "images": [
            {"id": k, "file_name": f"{k}.png", "width": width, "height": height}
            for k, (width, height) in IMAGES.items()
        ],
        "categories": [{"id": k, "name": name} for k, name in CATEGORIES.items()],
        "annotations": [],
    }
    for image, (width, height) in list(IMAGES.items())[:-1]:
        for _ in range(noise.randint(2, 4)):
            x, y = noise.randint(0, width - 12), noise.randint(0, height - 12)
            w, h = noise.randint(4, width - x), noise.randint(4, height - y)
            annotation = {
                "id": 100 + 3 * len(content["annotations"]),
                "image_id": image,
                "category_id": noise.choice(list(CATEGORIES)),
                "bbox": [x, y, w, h],
                "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
            }
            if noise.random() < 0.7:
                annotation.update(area=w * h * 0.9, iscrowd=0)
            content["annotations"].append(annotation)
    for place, compressed in ((3, False), (9, True)):
        annotation = content["annotations"][place]
        annotation.update(iscrowd=1, segmentation=_runs(annotation, content, compressed=compressed))
    return content


def _runs(annotation: dict[str, Any], content: Content, *, compressed: bool) -> dict[str, Any]:
    width, height = IMAGES[annotation["image_id"]]
    x, y, w, h = annotation["bbox"]
    mask = np.zeros((height, width), np.uint8, order="F")
    mask[y : y + h, x : x + w] = 1
    if compressed:
        rle = coco_mask.encode(mask)
        return {"size": [int(v) for v in rle["size"]], "counts": rle["counts"].decode()}
    flat = mask.ravel(order="F").astype(int)
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    return {"size": [height, width], "counts": ([0] if flat[0] else []) + counts}


def write_images(folder: Path) -> None:
    noise = np.random.default_rng(0)
    for image, (width, height) in IMAGES.items():
        cv2.imwrite(str(folder / f"{image}.png"), noise.integers(0, 255, (height, width, 3), dtype=np.uint8))


@dataclass
class Mutant:
    name: str
    split: str
    task: str
    text: str
    cleaned: Content | None


class Draft:
    """A file being spoiled, beside the file that it must be read as."""

    def __init__(self, noise: random.Random, split: str, task: str) -> None:
        self.noise, self.split, self.task = noise, split, task
        self.faulty, self.cleaned = sound_content(), sound_content()
        self.left_out: set[int] = set()
        self.refused = False
        self.free = list(range(len(self.faulty["annotations"])))
        noise.shuffle(self.free)
        self.text: Callable[[str], str] = lambda text: text

    def take(self) -> int:
        """The place of an annotation that no other fault has touched, and that is no crowd."""
        place = self.free.pop()
        return place if not self.faulty["annotations"][place].get("iscrowd") else self.take()

    def annotation(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        place = self.take()
        return place, self.faulty["annotations"][place], self.cleaned["annotations"][place]

    def size(self, annotation: dict[str, Any]) -> tuple[int, int]:
        return IMAGES[annotation["image_id"]]

    def finish(self, name: str) -> Mutant:
        kept = [a for k, a in enumerate(self.cleaned["annotations"]) if k not in self.left_out]
        cleaned = None if self.refused else {**self.cleaned, "annotations": kept}
        return Mutant(name, self.split, self.task, self.text(json.dumps(self.faulty)), cleaned)


Fault = Callable[[Draft], None]
OBJECT_FAULTS: dict[str, Fault] = {}  # of one annotation: several of them may meet in a file
FILE_FAULTS: dict[str, Fault] = {}  # of a file as a whole


def _of(table: dict[str, Fault]) -> Callable[[Fault], Fault]:
    def add(fault: Fault) -> Fault:
        table[fault.__name__] = fault
        return fault

    return add


NO_ID = (None, [], {}, [1], 5.5, float("nan"), True, "x", 10**9, -1, 10**30)


@_of(OBJECT_FAULTS)
def unknown_category(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    faulty["category_id"] = draft.noise.choice([*NO_ID, 0, "cat", "7"])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def unknown_image(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    faulty["image_id"] = draft.noise.choice([*NO_ID, 0, "5"])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def whole_number_as_float(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    for key in ("image_id", "category_id"):
        faulty[key] = float(faulty[key])


@_of(OBJECT_FAULTS)
def not_finite(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    for side in draft.noise.sample(range(4), draft.noise.randint(1, 4)):
        faulty["bbox"][side] = draft.noise.choice([float("nan"), float("inf"), -float("inf"), 1e300, 10**400, 1e9])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def negative_size(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    faulty["bbox"][draft.noise.choice([2, 3])] *= -1
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def outside(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    width, height = draft.size(faulty)
    w, h = faulty["bbox"][2:]
    faulty["bbox"][:2] = draft.noise.choice([(width, 3), (3, height + 40), (-w, 3), (3, -h - 7), (width + 1e4, 0.5)])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def less_than_a_pixel(draft: Draft) -> None:
    place, faulty, cleaned = draft.annotation()
    side, value = draft.noise.choice([2, 3]), draft.noise.choice([0, 0.0, 0.3, 0.999])
    faulty["bbox"][side] = cleaned["bbox"][side] = value
    if draft.split == "train":
        draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def no_box(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    if draft.noise.random() < 0.5:
        del faulty["bbox"]
    else:
        faulty["bbox"] = None
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def malformed_box(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    x, y, w, h = faulty["bbox"]
    shapes = [[], [x, y, w], [x, y, w, h, 1], [str(x), y, w, h], {"x": x}, 4, "1234", [[x, y], [w, h]]]
    faulty["bbox"] = draft.noise.choice([*shapes, [x, y, True, h], [x, y, None, h]])
    draft.refused = True


@_of(OBJECT_FAULTS)
def no_area(draft: Draft) -> None:
    place, faulty, cleaned = draft.annotation()
    faulty["area"] = cleaned["area"] = draft.noise.choice([0, 0.0])
    if draft.split == "train":
        draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def wrong_area(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    faulty["area"] = draft.noise.choice(["12", [], {}, True, -1, -0.5, float("nan"), float("inf"), 10**400, ""])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def null_fields(draft: Draft) -> None:
    _, faulty, cleaned = draft.annotation()
    for key in draft.noise.sample(("area", "iscrowd", "ignore"), draft.noise.randint(1, 3)):
        faulty[key] = None
        cleaned.pop(key, None)


@_of(OBJECT_FAULTS)
def wrong_flag(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    key = draft.noise.choice(["iscrowd", "ignore"])
    faulty[key] = draft.noise.choice([2, -1, "0", "no", "", [], {}, [0], 0.5, float("nan"), 10**30])
    draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def odd_flag(draft: Draft) -> None:
    _, faulty, cleaned = draft.annotation()
    faulty["iscrowd"] = draft.noise.choice([True, False, 1.0, 0.0])
    cleaned["iscrowd"] = int(faulty["iscrowd"])


@_of(OBJECT_FAULTS)
def ignored(draft: Draft) -> None:
    place, faulty, _ = draft.annotation()
    faulty["ignore"] = draft.noise.choice([1, True, 1.0])
    if draft.split == "train":
        draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def id_of_another(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    faulty["id"] = draft.noise.choice(draft.faulty["annotations"])["id"]


@_of(OBJECT_FAULTS)
def odd_id(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    faulty["id"] = draft.noise.choice([0, -4, None, "a", [], {}, 1.5, float("nan"), True, 10**30])
    if draft.noise.random() < 0.2:
        del faulty["id"]


@_of(OBJECT_FAULTS)
def more_fields(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    faulty[draft.noise.choice(["keypoints", "segments_info", "score", "", "caption"])] = draft.noise.choice(
        [3, None, [1]]
    )


@_of(OBJECT_FAULTS)
def wrong_mask(draft: Draft) -> None:
    place, faulty, cleaned = draft.annotation()
    width, height = draft.size(faulty)
    area = width * height
    sound = _runs(faulty, draft.faulty, compressed=True)
    runs = [
        {"size": [width, height], "counts": [0, area]},
        {"size": [height, width], "counts": [0, area + 1]},
        {"size": [height, width], "counts": [0, area - 1]},
        {"size": [height, width], "counts": [-5, area + 5]},
        {"size": [height, width], "counts": [area]},
        {"size": [height, width], "counts": []},
        {"size": [height, width], "counts": [0.5, area]},
        {"size": [height, width], "counts": None},
        {"size": [height, width]},
        {"counts": sound["counts"]},
        {"size": [float(height), float(width)], "counts": sound["counts"]},
        {"size": 7, "counts": sound["counts"]},
        {"size": [height, width], "counts": sound["counts"][:-1]},
        {"size": [height, width], "counts": sound["counts"] + "ooo1"},
        {"size": [height, width], "counts": "not runs at all"},
        {"size": [height, width], "counts": "o" * 4000},
        {"size": [height + 1, width], "counts": sound["counts"]},
    ]
    polygons = [
        [[1, 2, 3, 4]],
        [[]],
        [[1, 2], [3, 4]],
        [[1, 2, 3, 4, 5]],
        [[1, 2, 3, 4, 5, 6, 7]],
        [[float("nan"), 2, 9, 2, 9, 9]],
        [["1", "2", "9", "2", "9", "9"]],
        [[1e9, 2, 9, 2, 9, 9]],
        [[10**400, 2, 9, 2, 9, 9]],
        [1, 2, 9, 2, 9, 9],
        [None],
        "polygon",
        7,
    ]
    faulty["segmentation"] = draft.noise.choice(runs + polygons)
    if draft.task == "instance":
        draft.left_out.add(place)


@_of(OBJECT_FAULTS)
def wrong_part(draft: Draft) -> None:
    """A polygon that is none beside one that is."""
    _, faulty, _ = draft.annotation()
    part = draft.noise.choice(
        [[1, 2, 3, 4], [], [1, 2], [float("nan")] * 6, [1, 2, 3, 4, 5, 1e12], [1, 2, 3, 4, 5, 6, 7]]
    )
    faulty["segmentation"].insert(draft.noise.randint(0, 1), part)


@_of(OBJECT_FAULTS)
def no_mask(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    faulty["segmentation"] = draft.noise.choice([None, [], {}, "", 0])
    if draft.noise.random() < 0.3:
        del faulty["segmentation"]
    draft.refused |= draft.task == "instance"


@_of(OBJECT_FAULTS)
def given_twice(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    draft.faulty["annotations"].append(copy.deepcopy(faulty))


@_of(OBJECT_FAULTS)
def lacking_field(draft: Draft) -> None:
    _, faulty, _ = draft.annotation()
    del faulty[draft.noise.choice(["image_id", "category_id"])]
    draft.refused = True


@_of(FILE_FAULTS)
def no_entry(draft: Draft) -> None:
    entries = draft.faulty[draft.noise.choice(["images", "annotations", "categories"])]
    entries[draft.noise.randrange(len(entries))] = draft.noise.choice([None, 3, [], "x", {}, True])
    draft.refused = True


@_of(FILE_FAULTS)
def no_list(draft: Draft) -> None:
    key = draft.noise.choice(["images", "annotations", "categories"])
    draft.faulty[key] = draft.noise.choice([None, 3, "x", {}, True])
    if draft.noise.random() < 0.3:
        del draft.faulty[key]
    draft.refused = True


@_of(FILE_FAULTS)
def empty_list(draft: Draft) -> None:
    key = draft.noise.choice(["images", "annotations", "categories"])
    draft.faulty[key] = draft.cleaned[key] = []
    draft.refused = key != "annotations" or draft.split == "train"


@_of(FILE_FAULTS)
def wrong_image(draft: Draft) -> None:
    image = draft.noise.choice(draft.faulty["images"])
    key = draft.noise.choice(list(image))
    other = draft.noise.choice([i for i in draft.faulty["images"] if i is not image])
    sides = [None, "64", 0, -64, 64.5, [], {}, True, float("nan"), float("inf"), 10**12, 10**400]
    values = {
        "id": [None, [], {}, True, 1.5, "5", float("nan"), other["id"]],
        "file_name": [None, 3, "", " ", "a\0b.png", "\ud800.png", "nowhere.png", ".", "../", [], "x" * 5000],
        "width": [*sides, image["width"] + 1],
        "height": [*sides, image["height"] - 1],
    }
    image[key] = draft.noise.choice(values[key])
    if draft.noise.random() < 0.2:
        del image[key]
    draft.refused = True


@_of(FILE_FAULTS)
def sides_mixed_up(draft: Draft) -> None:
    for image in draft.noise.sample(draft.faulty["images"], draft.noise.randint(1, len(IMAGES))):
        image["width"], image["height"] = image["height"], image["width"]
    draft.refused = True


@_of(FILE_FAULTS)
def numbers_as_tables_write_them(draft: Draft) -> None:
    for image in draft.faulty["images"]:
        for key in ("id", "width", "height"):
            image[key] = float(image[key])
    for category in draft.faulty["categories"]:
        category["id"] = float(category["id"])


@_of(FILE_FAULTS)
def wrong_category(draft: Draft) -> None:
    categories = draft.faulty["categories"]
    category = draft.noise.choice(categories)
    other = draft.noise.choice([c for c in categories if c is not category])
    key = draft.noise.choice(["id", "name"])
    values = {
        "id": [None, [], {}, True, 1.5, "7", float("nan"), other["id"]],
        "name": [None, 3, "", [], {}, "\ud800", "goose", other["name"]],
    }
    category[key] = draft.noise.choice(values[key])
    if draft.noise.random() < 0.2:
        del category[key]
    draft.refused = True


@_of(FILE_FAULTS)
def lacking_category(draft: Draft) -> None:
    draft.faulty["categories"].pop(draft.noise.randrange(len(CATEGORIES)))
    draft.refused = True  # the other split has it


@_of(FILE_FAULTS)
def normalised(draft: Draft) -> None:
    for annotation in draft.faulty["annotations"]:
        width, height = draft.size(annotation)
        x, y, w, h = annotation["bbox"]
        centre = draft.noise.choice([0, 0.5])
        annotation["bbox"] = [(x + centre * w) / width, (y + centre * h) / height, w / width, h / height]
    draft.refused = True


@_of(FILE_FAULTS)
def corners(draft: Draft) -> None:
    for annotation in draft.faulty["annotations"]:
        x, y, w, h = annotation["bbox"]
        annotation["bbox"] = [x, y, x + w, y + h]
    draft.refused = True


@_of(FILE_FAULTS)
def all_of_no_area(draft: Draft) -> None:
    for content in (draft.faulty, draft.cleaned):
        for annotation in content["annotations"]:
            annotation["area"] = 0
    draft.refused = draft.split == "train"


@_of(FILE_FAULTS)
def all_faulty(draft: Draft) -> None:
    """One fault that leaves out an object, in all of them."""
    key, value = draft.noise.choice(
        [
            ("iscrowd", 1),
            ("iscrowd", "0"),
            ("category_id", 55),
            ("image_id", 10**6),
            ("bbox", None),
            ("bbox", [500, 500, 9, 9]),
            ("bbox", [float("nan")] * 4),
            ("bbox", [30, 30, -9, -9]),
            ("area", -1),
        ]
    )
    for annotation in draft.faulty["annotations"]:
        annotation[key] = copy.copy(value)
    draft.refused = True


@_of(FILE_FAULTS)
def no_json(draft: Draft) -> None:
    ruins: list[Callable[[str], str]] = [
        lambda text: "",
        lambda text: text[: draft.noise.randrange(len(text))],
        lambda text: text + draft.noise.choice(["}", ",", "x", "[]"]),
        lambda text: text.replace(":", "=", 1),
        lambda text: text.replace(",", " ", 1),
        lambda text: text.replace('"', "'"),
        lambda text: "[" * 100_000 + text,
        lambda text: '{"info": ' + "[" * 100_000 + "]" * 100_000 + "," + text[1:],
        lambda text: '{"info": ' + "9" * 5000 + "," + text[1:],
        lambda text: f"[{text}]",
        lambda text: "null",
        lambda text: "3",
        lambda text: json.dumps(text),
    ]
    draft.text = draft.noise.choice(ruins)
    draft.refused = True


@_of(FILE_FAULTS)
def odd_but_sound(draft: Draft) -> None:
    """Another way of writing the same."""
    draft.text = draft.noise.choice(
        [
            lambda text: "\ufeff" + text,
            lambda text: json.dumps(json.loads(text), indent=3),
            lambda text: '{"info": {"deep": [[[[]]]]}, "licenses": null,' + text[1:],
            lambda text: f"\n\t {text}\r\n",
            lambda text: '{"images": 3,' + text[1:],  # the last of two equal keys counts
        ]
    )


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    noise = random.Random(seed)
    for _ in range(count):
        draft = Draft(noise, noise.choice(SPLITS), noise.choice(TASKS))
        if noise.random() < 0.4:
            names = [noise.choice(list(FILE_FAULTS))]
            FILE_FAULTS[names[0]](draft)
        else:
            names = [noise.choice(list(OBJECT_FAULTS)) for _ in range(noise.randint(1, 3))]
            for name in names:
                OBJECT_FAULTS[name](draft)
        yield draft.finish("+".join(names))
