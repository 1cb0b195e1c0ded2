"""One rank of a node reads the annotation file; the others map its arrays and see the same data."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from annotation_mutants import sound_content, write_images

from engine import distributed
from engine.config.schema import DataConfig, SplitConfig
from engine.data import build, node_share
from engine.data.annotation_table import AnnotationTable, pack_objects
from engine.errors import UserError


def everything(data):
    """All that the data sets say, and what is scored with."""
    train, val, classes = build.build_data(data)
    infos = [[split.dataset.get_data_info(k) for k in range(len(split.dataset))] for split in (train, val)]
    return json.dumps([infos, val.content, classes, np.asarray(train.dataset.landscape()).tolist()])


def only_the_first_rank_reads(data, hidden):
    """What a rank sees, whether it has read the file, and whether its arrays are mapped."""
    reads = []
    own = build.read_annotations

    def reading(path):
        reads.append(path)
        return own(path)

    with mock.patch.object(build, "read_annotations", reading):
        if hidden and distributed.rank() == 1:  # as in a container of its own
            with mock.patch.object(
                Path, "is_dir", lambda path: "gigadet-shared" not in str(path) and os.path.isdir(path)
            ):
                found = everything(data)
        else:
            found = everything(data)
    return found, len(reads)


def data_config(folder, train, val):
    files = {}
    for name, content in (("train", train), ("val", val)):
        (folder / f"{name}.json").write_text(json.dumps(content))
        files[name] = SplitConfig(annotations=str(folder / f"{name}.json"), images=str(folder / "images"))
    return DataConfig(**files, task="instance", scale=[64, 64], workers=0)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    write_images(tmp_path / "images")
    return tmp_path


@pytest.mark.parametrize("hidden", [False, True])
def test_the_other_ranks_map_what_the_first_has_read(ranks, folder, hidden):
    data = data_config(folder, sound_content(), sound_content())
    expected = everything(data)
    found = ranks.run(only_the_first_rank_reads, 3, data, hidden)
    assert [seen for seen, _ in found] == [expected] * 3
    assert [reads for _, reads in found] == [2, 2 if hidden else 0, 0]
    assert not list(Path(tempfile.gettempdir()).glob("gigadet-shared-*"))


def refusal(data):
    try:
        build.build_data(data)
    except UserError as error:
        return str(error)


def test_the_error_of_the_rank_that_reads_is_that_of_all(ranks, folder):
    first, second = ranks.run(refusal, 2, data_config(folder, sound_content(), {"images": 1}))
    assert "is not in COCO form" in first and second == f"rank 0: {first}"
    assert not list(Path(tempfile.gettempdir()).glob("gigadet-shared-*"))


def shared_from_a_full_disk():
    with mock.patch.object(node_share.np, "save", mock.Mock(side_effect=OSError(28, "No space left on device"))):
        try:
            node_share.shared_by_node(lambda: {"a": np.ones(3)}, "annotation file x.json")
        except UserError as error:
            return str(error)


def test_a_full_disk_is_one_sentence_on_all_ranks(ranks):
    for text in ranks.run(shared_from_a_full_disk, 2):
        assert "annotation file x.json cannot be shared" in text and "No space left" in text and "TMPDIR" in text


def types_of_mapped_arrays():
    made = {"full": np.arange(5), "none": np.zeros((0, 4)), "text": np.array([b"ab", b"c"])}
    arrays = node_share.shared_by_node(lambda: made, "numbers")
    base = arrays["full"].base
    while type(base) is np.ndarray:
        base = base.base
    return {name: array.tolist() for name, array in arrays.items()}, type(base).__name__, arrays["full"].flags.writeable


def test_arrays_are_mapped_read_only_and_may_be_empty(ranks):
    for arrays, base, writeable in ranks.run(types_of_mapped_arrays, 2):
        assert arrays == {"full": [0, 1, 2, 3, 4], "none": [], "text": [b"ab", b"c"]}
        assert base == "memmap" and not writeable


def test_ids_may_be_texts_or_large_and_objects_in_any_order():
    for ids in (["a", "ü"], [2**70, 3]):
        content = {
            "images": [{"id": i, "file_name": f"{i}.jpg", "height": 4, "width": 5} for i in ids],
            "categories": [{"id": 9, "name": "cat"}, {"id": 4, "name": "dog"}],
            "annotations": [
                {"image_id": ids[1], "category_id": 4, "bbox": [0, 1.5, 2, 3]},
                {"image_id": ids[0], "category_id": 9, "bbox": [0, 0, 1, 1], "area": 0.5, "iscrowd": 1},
                {"image_id": ids[1], "category_id": 9, "bbox": [1, 1, 1, 1]},
            ],
        }
        table = AnnotationTable(pack_objects(content, masks=False))
        assert table.content()["images"] == content["images"]
        found = [
            (a["image_id"], a["category_id"], a["bbox"], a["area"], a["iscrowd"])
            for a in table.content()["annotations"]
        ]
        assert found == [
            (ids[0], 9, [0, 0, 1, 1], 0.5, 1),
            (ids[1], 4, [0, 1.5, 2, 3], 6, 0),
            (ids[1], 9, [1, 1, 1, 1], 1, 0),
        ]
        dogs = table.content(lambda number: number == 1)
        assert [a["image_id"] for a in dogs["annotations"]] == [ids[1]] and len(dogs["images"]) == 2
