"""The segments in a COCO-panoptic file: each fault is refused, for its pixels could not be left out."""

from __future__ import annotations

from typing import Any

from engine.data.annotation_file import shown
from engine.errors import DataError

IGNORED = 255  # class of void pixels in mmdet's training maps, which have one byte per pixel


def check_segments(content: dict[str, Any], path: str) -> list[str]:
    """Check that every image has an entry, that every segment has a unique id and a known category, and that the class
    numbers fit in a byte. Returns what is odd but does no harm."""
    if len(content["categories"]) > IGNORED:
        raise DataError(
            f"annotation file {path} lists {len(content['categories'])} categories, but panoptic training takes at "
            f"most {IGNORED}, for a pixel of its maps is a byte and {IGNORED} stands for void: join or remove some"
        )
    categories = {category["id"] for category in content["categories"]}
    known: set[Any] = set()
    for place, annotation in enumerate(content["annotations"]):
        where = f"annotation file {path}: annotations[{place}]"
        if not isinstance(annotation.get("segments_info"), list):
            raise DataError(f'{path} is not a panoptic file: annotations[{place}] has no "segments_info"')
        if not isinstance(annotation.get("file_name"), str) or "\0" in annotation["file_name"]:
            raise DataError(f'{where} has no "file_name", the name of its PNG')
        image = annotation["image_id"]
        if type(image) not in (int, str):
            raise DataError(f"{where}.image_id must be the id of an image, got {shown(image)}")
        if image in known:
            raise DataError(f"{where} is the second one of image {image}")
        known.add(image)
        _check_entry(annotation["segments_info"], categories, where)
    images = {image["id"] for image in content["images"]}
    for image in content["images"]:
        if image["id"] not in known:
            raise DataError(
                f"annotation file {path}: image {image['file_name']} has no segments (no entry in annotations)"
            )
    strangers = [image_id for image_id in known if image_id not in images]
    if strangers:
        return [f"{len(strangers):,} entries of {path} are of unknown images (image {strangers[0]}) and left out"]
    return []


def _check_entry(segments: list[Any], categories: set[Any], where: str) -> None:
    """Check the segments of one image."""
    ids = set()
    for segment in segments:
        if not isinstance(segment, dict):
            raise DataError(f'{where} has a segment that is no object with "id" and "category_id": {shown(segment)}')
        for key in ("id", "category_id"):
            if key not in segment:
                raise DataError(f'{where} has a segment without "{key}"')
        number, category = segment["id"], segment["category_id"]
        if type(number) is not int:
            raise DataError(f'{where} has a segment whose "id" must be a whole number, got {shown(number)}')
        if not 0 < number < 256**3:
            raise DataError(f"{where} has the segment id {shown(number)}, but a PNG holds 1 to {256**3 - 1}")
        if type(category) not in (int, str) or category not in categories:
            raise DataError(f"{where} has a segment of category {shown(category)}, which is not among the categories")
        if segment.get("iscrowd") not in (0, 1, None):
            raise DataError(f"{where} has a segment whose iscrowd must be 0 or 1, got {shown(segment['iscrowd'])}")
        if number in ids:
            raise DataError(f"{where} has the segment {number} twice")
        ids.add(number)
