"""What the rest of the engine needs to know about a data set: its classes and its splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.config.schema import SplitConfig
from engine.data.annotation_table import AnnotationTable


class Classes(NamedTuple):
    """Class names in label order, and their ids in the annotation file."""

    things: tuple[str, ...]
    stuff: tuple[str, ...]
    category_ids: tuple[int, ...]  # things first, then stuff

    @property
    def all(self) -> tuple[str, ...]:
        return self.things + self.stuff

    def to_meta(self) -> dict[str, Any]:
        """For weight files, under mmdet's names; `category_ids` is our addition."""
        meta = dict(classes=list(self.all), category_ids=list(self.category_ids))
        return meta | (dict(thing_classes=list(self.things), stuff_classes=list(self.stuff)) if self.stuff else {})

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Classes:
        """From a weight file that names its classes. mmdet's files have no ids."""
        names = tuple(meta["classes"])
        things = len(names) - len(meta.get("stuff_classes", ()))
        return cls(names[:things], names[things:], tuple(meta.get("category_ids", range(1, len(names) + 1))))


@dataclass(frozen=True, kw_only=True)
class Split:
    dataset: Any
    files: SplitConfig
    truth: AnnotationTable | None = None  # the annotated objects, for scoring; None if the data set has the labels

    @property
    def content(self) -> dict[str, Any]:
        """The annotation file as dictionaries, made anew each time: they are large, and few ranks need them."""
        return {} if self.truth is None else self.truth.content()
