"""mmdet's CocoDataset for annotations in flat arrays, cleaned (`engine.data.cleaning`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.data.annotation_table import AnnotationTable
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmdet.datasets import CocoDataset  # noqa: E402


class GigadetCoco(CocoDataset):
    """An image's dictionary is made from the arrays when it is asked for."""

    METAINFO: dict[str, Any] = {}

    def __init__(self, *, table: AnnotationTable, **options: Any) -> None:
        self.table = table
        self._fully_initialized = False
        super().__init__(**options)

    def full_init(self) -> None:
        if self._fully_initialized:
            return
        labels = {name: label for label, name in enumerate(self.metainfo["classes"])}
        # Categories are known by their number in the file, which a range finds faster than a list of ids.
        self.cat_ids = range(len(self.table.categories))
        self.cat2label = {number: labels[category["name"]] for number, category in enumerate(self.table.categories)}
        self._rows = self._used_rows()
        self._fully_initialized = True

    def _used_rows(self) -> np.ndarray:
        """Rows of the table: all images, or those with objects."""
        return self._with_objects() if self._leaves_out_empty else np.arange(len(self.table))

    @property
    def _leaves_out_empty(self) -> bool:
        return not self.test_mode and bool((self.filter_cfg or {}).get("filter_empty_gt"))

    def _with_objects(self) -> np.ndarray:
        return self.table.with_objects()

    def __len__(self) -> int:
        return len(self._rows)

    def get_data_info(self, idx: int) -> dict[str, Any]:
        row = int(self._rows[idx])
        return {**self._entry(row), "sample_idx": idx if idx >= 0 else len(self) + idx}

    def _entry(self, row: int) -> dict[str, Any]:
        image = self.table.image(row)
        return self.parse_data_info(
            {"raw_ann_info": self.table.objects(row), "raw_img_info": {**image, "img_id": image["id"]}}
        )

    def landscape(self) -> np.ndarray:
        """Whether each image is at least as wide as tall."""
        arrays = self.table.arrays
        return arrays["width"][self._rows] >= arrays["height"][self._rows]
