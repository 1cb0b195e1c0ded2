"""The few things that mmdet's CocoDataset leaves out: incomplete annotations, and naming the file that fails."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from engine.data.coco import DataError
from engine.data.order import SampleKey
from engine.mmdet_setup import import_mmdet
from engine.randomness import SAMPLE, seed_all

import_mmdet()
from mmdet.datasets import CocoDataset  # noqa: E402


class GigadetCoco(CocoDataset):
    """mmdet's CocoDataset over annotations already in memory, also for hand-made files without `area` or `iscrowd`."""

    METAINFO: dict[str, Any] = {}

    def __init__(self, *, content: dict[str, Any], **options: Any) -> None:
        self._content = content
        super().__init__(**options)

    def load_data_list(self) -> list[dict]:
        content, self._content = self._content, {}
        ids = {category["name"]: category["id"] for category in content["categories"]}
        self.cat_ids = [ids[name] for name in self.metainfo["classes"]]
        self.cat2label = {category: label for label, category in enumerate(self.cat_ids)}
        self.cat_img_map: dict[int, set[int]] = defaultdict(set)
        by_image: dict[int, list[dict]] = defaultdict(list)
        for annotation in content["annotations"]:
            if "bbox" not in annotation:  # nothing to train on: as COCO training skips a region without a box
                continue
            annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
            by_image[annotation["image_id"]].append(annotation)
            self.cat_img_map[annotation["category_id"]].add(annotation["image_id"])
        return [
            self.parse_data_info(
                {"raw_ann_info": by_image[image["id"]], "raw_img_info": {**image, "img_id": image["id"]}}
            )
            for image in content["images"]
        ]


class Unreadable:
    """A sample that could not be loaded. It travels instead of an exception, which a worker would wrap in a traceback."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def load_sample(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # whatever a transform raises: the file is named and the run stops with it
        if isinstance(error, DataError):  # it says all there is to say
            return Unreadable(str(error))
        path = dataset.get_data_info(index)["img_path"]
        if isinstance(error, FileNotFoundError):
            return Unreadable(f"image {path} does not exist, though the annotation file lists it")
        # cv2 answers None for a broken file, and the loader trips over that.
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Unreadable(f"image {path} cannot be loaded ({type(error).__name__}: {what})")


class SeededDataset:
    """Samples by key: the augmentation of a sample depends on its key and the run's seed, not on who loads it."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        seed_all(self.seed, SAMPLE, key.epoch, key.position)
        return load_sample(self.dataset, key.index)
