"""mmdet's CocoDataset for annotations that are already in memory, cleaned (`engine.data.cleaning`)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.datasets import CocoDataset  # noqa: E402


class GigadetCoco(CocoDataset):
    """Also works for hand-made files without `area` or `iscrowd`."""

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
            annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])
            by_image[annotation["image_id"]].append(annotation)
            self.cat_img_map[annotation["category_id"]].add(annotation["image_id"])
        return [
            self.parse_data_info(
                {"raw_ann_info": by_image[image["id"]], "raw_img_info": {**image, "img_id": image["id"]}}
            )
            for image in content["images"]
        ]
