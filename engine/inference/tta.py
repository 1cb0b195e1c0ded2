"""Test-time augmentation: predict at several scales, plain and mirrored, and merge the boxes as mmdet's DetTTAModel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from engine.config.origin import Origin
from engine.config.schema import RunConfig
from engine.data.types import Split
from engine.errors import ConfigError
from engine.modeling.detector import config_path
from engine.modeling.preprocessing import Preprocess

# Used if the detector's config has no `tta_model`.
DEFAULT = dict(nms=dict(type="nms", iou_threshold=0.5), max_per_img=100)
_META = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor", "flip", "flip_direction")


def parse_scales(texts: Sequence[str], default: Sequence[int]) -> list[tuple[int, int]]:
    """`1600x1200` as (longer, shorter); without texts the config's scale."""
    scales = []
    for text in texts:
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) >= 16 for part in parts):
            raise ConfigError(f"--tta takes scales such as 1600x1200 (longer and shorter side), got {text!r}")
        scales.append((int(parts[0]), int(parts[1])))
    return scales or [(default[0], default[1])]


def show_views(split: Split, scales: Sequence[tuple[int, int]]) -> None:
    """Let the split's data set return every image in all views: each scale, plain and mirrored."""
    from mmengine.dataset import Compose  # here: mmdet's libraries take seconds to import

    split.dataset.pipeline = Compose(
        [
            dict(type="LoadImageFromFile", backend_args=None),
            dict(
                type="TestTimeAug",
                transforms=[
                    [dict(type="Resize", scale=scale, keep_ratio=True) for scale in scales],
                    [dict(type="RandomFlip", prob=0.0), dict(type="RandomFlip", prob=1.0)],
                    [dict(type="PackDetInputs", meta_keys=_META)],
                ],
            ),
        ]
    )


class ViewPreprocessor:
    """Preprocesses view by view: the first view of all images of the batch, then the second, and so on."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __call__(self, batch: dict[str, Any], *, training: bool) -> tuple[list[Any], None]:
        count = len(batch["inputs"][0])
        return [
            self.preprocess({key: [views[k] for views in values] for key, values in batch.items()}, training=training)
            for k in range(count)
        ], None


class MergedViews(nn.Module):
    """Predicts every view and merges their boxes. mmdet cannot merge masks, so a mask head is removed."""

    def __init__(self, model: Any, config: RunConfig) -> None:
        super().__init__()
        # Here, because import_mmdet() must come first.
        from mmdet.models.test_time_augs import DetTTAModel
        from mmengine.config import Config, ConfigDict

        if getattr(model, "with_mask", False):
            if not hasattr(model, "roi_head"):
                raise ConfigError(f"--tta merges boxes, and {type(model).__name__} finds masks without regions")
            model.roi_head.mask_head = None
        path, trusted = (
            config_path(config.detector.config, config.detector.origin),
            config.detector.origin is Origin.USER,
        )
        own = Config.fromfile(str(path), import_custom_modules=trusted).get("tta_model")
        self.model: Any = model
        self.merge = DetTTAModel(module=model, tta_cfg=ConfigDict(own.tta_cfg if own is not None else DEFAULT))

    def predict(self, views: Sequence[Any], _: None) -> list[Any]:
        predictions = [self.model.predict(images, samples) for images, samples in views]
        return self.merge.merge_preds(list(zip(*predictions)))
