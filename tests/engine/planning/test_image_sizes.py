"""Sizes of padded micro-batches: what has to fit, what is usual, and what the slowest rank has."""

from __future__ import annotations

import pytest

from engine.config.schema import DataConfig
from engine.errors import UserError
from engine.planning.image_sizes import ImageSizes, Size, parse_size


def _data(**changes) -> DataConfig:
    return DataConfig(dataset="shapes", **changes)


def test_two_images_may_lie_across_each_other_unless_they_are_grouped():
    assert ImageSizes(_data(), 2).largest == Size(1344, 1344)
    assert ImageSizes(_data(group_by_aspect=True), 2).largest == Size(800, 1344)
    assert ImageSizes(_data(), 1).largest == Size(800, 1344)


def test_the_slowest_of_many_ranks_has_more_pixels_than_the_mean_and_no_more_than_the_largest():
    sizes = ImageSizes(_data(train_scales=[[1600, 400], [1600, 1200]]), 2)
    few, many = sizes.slowest(4), sizes.slowest(480)
    assert sizes.pixels.mean() < few < many <= sizes.largest.pixels


def test_a_crop_or_a_classifier_has_one_size():
    # VariedCrop has (height, width), mmdet's crops have (width, height).
    cropped = ImageSizes(_data(augmentation=[{"type": "VariedCrop", "size": [512, 256]}]), 4)
    assert cropped.mean == cropped.largest == Size(height=512, width=256)
    assert cropped.slowest(64) == 256 * 512
    by_mmdet = ImageSizes(_data(augmentation=[{"type": "RandomCrop", "crop_size": [512, 256]}]), 4)
    assert by_mmdet.largest == Size(height=256, width=512)
    assert ImageSizes(_data(task="classification"), 4).largest == Size(224, 224)


@pytest.mark.parametrize(
    "kind, size", [("relative", [0.5, 0.5]), ("relative_range", [0.3, 0.3]), ("absolute_range", [384, 600])]
)
def test_a_crop_of_no_fixed_size_counts_as_none(kind, size):
    cropped = ImageSizes(_data(augmentation=[{"type": "RandomCrop", "crop_type": kind, "crop_size": size}]), 2)
    assert (cropped.mean, cropped.largest) == (ImageSizes(_data(), 2).mean, Size(1344, 1344))
    absolute = [{"type": "RandomCrop", "crop_type": "absolute", "crop_size": [512, 256]}]
    assert ImageSizes(_data(augmentation=absolute), 2).largest == Size(256, 512)


def test_a_size_is_width_by_height_padded():
    assert parse_size("1333x800") == Size(800, 1344)
    for text in ("1333", "1333x", "0x800", "axb", "²x64", "64x²"):
        with pytest.raises(UserError, match="WIDTHxHEIGHT"):
            parse_size(text)
