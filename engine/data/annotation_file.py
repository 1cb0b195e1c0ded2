"""Read an annotation file in COCO form, and check what no reader can do without: lists, fields, ids, names and sizes.

Whatever is wrong here makes the file as a whole unusable, so it is refused in one sentence. Single objects that cannot
be used are the subject of `engine.data.cleaning`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import DataError

MOST_PIXELS = 1_000_000  # of an image's side: more is a mistake, and memory for its masks would be asked for
_LONGEST = 1000  # characters of a name
_SHOWN = 60  # characters of a wrong value in a message


def read_annotations(path: str) -> dict[str, Any]:
    """The content of an annotation file, checked for what any COCO reader needs."""
    content = _parse(path)
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f'annotation file {path} is not in COCO form: it has no list "{key}"')
    for key in ("images", "categories"):
        if not content[key]:
            raise DataError(f"annotation file {path} lists no {key}")
    _check_images(content["images"], path)
    _check_categories(content["categories"], path)
    _check_annotations(content["annotations"], path)
    return content


def _parse(path: str) -> Any:
    try:
        # Editors on Windows put a byte order mark before the JSON, which "utf-8-sig" takes away.
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"annotation file {path} does not exist: check data.root and the split's annotations") from None
    except json.JSONDecodeError as error:
        raise DataError(f"annotation file {path} is not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise DataError(f"annotation file {path} cannot be read: its lists are nested too deeply") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a number of more than 4300 digits
        raise DataError(f"annotation file {path} cannot be read: {error}") from None


def shown(value: Any) -> str:
    """A wrong value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def is_number(value: Any) -> bool:
    return type(value) in (int, float)  # bool is a kind of int in Python, but no number in a file


def _check_images(images: list[Any], path: str) -> None:
    _check_fields(images, "images", ("id", "file_name", "height", "width"), path)
    _check_ids(images, "images", path)
    _check_texts(images, "images", "file_name", path)
    for side in ("height", "width"):
        for place, image in enumerate(images):
            value = image[side]
            if not is_number(value) or not 0 < value <= MOST_PIXELS or value != int(value):
                _refuse(path, f"images[{place}].{side} must be a whole number of pixels above 0", value)
            image[side] = int(value)


def _check_categories(categories: list[Any], path: str) -> None:
    _check_fields(categories, "categories", ("id", "name"), path)
    _check_ids(categories, "categories", path)
    _check_texts(categories, "categories", "name", path)
    _check_unique(categories, "categories", "name", path)
    for place, category in enumerate(categories):
        if category.get("isthing", 1) not in (0, 1):
            _refuse(path, f"categories[{place}].isthing must be 0 or 1", category["isthing"])


def _check_annotations(annotations: list[Any], path: str) -> None:
    """There may be tens of millions, so a place is only looked for where something is known to be wrong."""
    _check_fields(annotations, "annotations", ("image_id",), path)
    if not all("category_id" in annotation or "segments_info" in annotation for annotation in annotations):
        place = _first(annotations, lambda a: "category_id" not in a and "segments_info" not in a)
        raise DataError(f'annotation file {path} is not in COCO form: annotations[{place}] has no "category_id"')
    boxes = [annotation["bbox"] for annotation in annotations if annotation.get("bbox") is not None]
    if not _are_boxes(boxes):
        place = _first(annotations, lambda a: a.get("bbox") is not None and not _are_boxes([a["bbox"]]))
        _refuse(path, f"annotations[{place}].bbox must be [x, y, width, height]", annotations[place]["bbox"])


def _are_boxes(boxes: list[Any]) -> bool:
    """Whether each is a list of four numbers."""
    return (
        set(map(type, boxes)) <= {list}
        and set(map(len, boxes)) <= {4}
        and set(map(type, chain.from_iterable(boxes))) <= {int, float}
    )


def _check_fields(entries: list[Any], key: str, needed: tuple[str, ...], path: str) -> None:
    def lacks(entry: Any) -> bool:
        return not isinstance(entry, dict) or any(name not in entry for name in needed)

    if any(map(lacks, entries)):
        place = _first(entries, lacks)
        entry = entries[place]
        lacking = next(name for name in needed if not isinstance(entry, dict) or name not in entry)
        raise DataError(f'annotation file {path} is not in COCO form: {key}[{place}] has no "{lacking}"')


def _check_ids(entries: list[Any], key: str, path: str) -> None:
    """Whole numbers, or texts, each once. Two kinds in one file could not be sorted."""
    for place, entry in enumerate(entries):
        value = entry["id"]
        if type(value) is float and value.is_integer():  # as tables write whole numbers
            entry["id"] = int(value)
        elif type(value) not in (int, str):
            _refuse(path, f"{key}[{place}].id must be a whole number", value)
        if type(entry["id"]) is not type(entries[0]["id"]):
            _refuse(path, f"{key}[{place}].id must be {_kind(entries[0]['id'])} as in {key}[0]", value)
    _check_unique(entries, key, "id", path)


def _check_unique(entries: list[Any], key: str, field: str, path: str) -> None:
    values = [entry[field] for entry in entries]
    if len(set(values)) != len(values):
        twice = next(value for value, count in Counter(values).items() if count > 1)
        raise DataError(f"annotation file {path}: the {field} {shown(twice)} stands twice in {key}")


def _check_texts(entries: list[Any], key: str, field: str, path: str) -> None:
    for place, entry in enumerate(entries):
        value = entry[field]
        if not isinstance(value, str) or not value.strip() or "\0" in value or not _is_unicode(value):
            _refuse(path, f"{key}[{place}].{field} must be a text", value)
        if len(value) > _LONGEST:
            _refuse(path, f"{key}[{place}].{field} must be a text of at most {_LONGEST:,} characters", value)


def _is_unicode(text: str) -> bool:
    """JSON may hold half of a character (a lone surrogate), which no file name and no screen can show."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else "a whole number"


def _first(entries: list[Any], wrong: Callable[[Any], bool]) -> int:
    return next(place for place, entry in enumerate(entries) if wrong(entry))


def _refuse(path: str, rule: str, value: Any) -> NoReturn:
    raise DataError(f"annotation file {path}: {rule}, got {shown(value)}")
