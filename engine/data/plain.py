"""Images without annotations as a test data set, so that prediction uses the same code as evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PlainImages:
    def __init__(self, paths: Sequence[Path], pipeline: Sequence[Any]) -> None:
        from mmengine.dataset import Compose  # here: mmdet's libraries take seconds to import

        self.paths, self.pipeline = paths, Compose(pipeline)

    def __len__(self) -> int:
        return len(self.paths)

    def get_data_info(self, index: int) -> dict[str, Any]:
        return dict(img_path=str(self.paths[index]), img_id=index + 1)

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(self.get_data_info(index))
