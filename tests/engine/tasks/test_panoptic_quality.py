"""PQ against a computation that knows nothing of ours: sets of pixels, segment by segment, as the definition reads."""

import itertools
import json
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.panoptic_map import PanopticMap, encode_png, from_codes, read_ids, segment_ids
from engine.tasks.panoptic_quality import add_up, class_quality, image_quality, quality_by_class, quality_metrics

CLASSES = 5
DATA = Path(os.environ.get("GIGADET_DATA", Path(__file__).parents[4] / "shared" / "data")).resolve()
SAMPLE = DATA / "coco_panoptic_sample"
needs_sample = pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"no COCO panoptic sample below {DATA}")


def as_sets(panoptic):
    """[(class, crowd, set of pixel numbers)] and the void pixels, of a map."""
    flat = panoptic.pixels.ravel()
    segments = [
        (int(label), bool(crowd), {int(i) for i in np.flatnonzero(flat == number)})
        for number, (label, crowd) in enumerate(zip(panoptic.labels, panoptic.crowd), 1)
    ]
    return [s for s in segments if s[2]], {int(i) for i in np.flatnonzero(flat == 0)}


def brute_force(pairs):
    """{class: (PQ, SQ, RQ)} in exact fractions, of [(truth, found)]."""
    sums = {}
    for truth, found in pairs:
        real, void = as_sets(truth)
        guesses, _ = as_sets(found)
        used_real, used_guess = set(), set()
        for (i, (label, crowd, pixels)), (j, (guess, _, there)) in itertools.product(
            enumerate(real), enumerate(guesses)
        ):
            iou = Fraction(len(pixels & there), len(pixels | (there - void)) or 1)
            if not crowd and label == guess and iou > Fraction(1, 2):
                assert i not in used_real and j not in used_guess
                used_real.add(i)
                used_guess.add(j)
                sums.setdefault(label, []).append(("match", iou))
        for i, (label, crowd, _) in enumerate(real):
            if i not in used_real and not crowd:
                sums.setdefault(label, []).append(("missed", 0))
        for j, (label, _, pixels) in enumerate(guesses):
            free = set(void).union(*(s[2] for s in real if s[1] and s[0] == label))
            if j not in used_guess and not Fraction(len(pixels & free), len(pixels)) > Fraction(1, 2):
                sums.setdefault(label, []).append(("wrong", 0))
    answer = {}
    for label, events in sums.items():
        ious = [iou for kind, iou in events if kind == "match"]
        weight = len(ious) + Fraction(len(events) - len(ious), 2)
        answer[label] = (sum(ious) / weight, sum(ious) / len(ious) if ious else 0, len(ious) / weight)
    return answer


def mean_of(answer, labels):
    rows = [answer[label] for label in labels if label in answer]
    return [100 * float(sum(column) / len(rows)) for column in zip(*rows)] if rows else [-1.0] * 3


def check(pairs, classes=CLASSES, things=3):
    table = add_up([image_quality(*pair) for pair in pairs], classes)
    metrics, expected = quality_metrics(table, things), brute_force(pairs)
    for suffix, labels in (("", range(classes)), ("_th", range(things)), ("_st", range(things, classes))):
        assert [metrics[name + suffix] for name in ("PQ", "SQ", "RQ")] == pytest.approx(
            mean_of(expected, labels), abs=1e-9
        )
    quality = class_quality(table)
    assert {k for k in range(classes) if not np.isnan(quality[k, 0])} == set(expected)
    for label, values in expected.items():
        assert quality[label] == pytest.approx([100 * float(v) for v in values], abs=1e-9)
    return metrics


def panoptic(pixels, labels, crowd=None):
    labels = np.array(labels, np.int64)
    return PanopticMap(
        pixels=np.array(pixels, np.int32),
        labels=labels,
        crowd=np.zeros(len(labels), bool) if crowd is None else np.array(crowd, bool),
    )


def random_pair(rng, size=9):
    """Blocks of segments, and a prediction that is the truth with some of it moved, renamed, merged and voided."""
    count = int(rng.integers(1, 7))
    coarse = rng.integers(0, count + 1, (3, 3))
    pixels = np.kron(coarse, np.ones((size // 3, size // 3), int))
    truth = panoptic(pixels, rng.integers(0, CLASSES, count), rng.random(count) < 0.3)
    moved = np.where(rng.random(pixels.shape) < rng.choice([0.1, 0.4]), np.roll(pixels, 1, 0), pixels)
    moved = np.where(rng.random(pixels.shape) < 0.1, 0, moved)
    extra = np.where((pixels == 0) & (rng.random() < 0.5), count + 1, moved)
    renamed = np.where(rng.random(count) < 0.2, rng.integers(0, CLASSES, count), truth.labels)
    return truth, panoptic(extra, [*renamed, rng.integers(0, CLASSES)])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_random_maps_score_as_the_definition_says(seed, images):
    rng = np.random.default_rng(seed)
    check([random_pair(rng) for _ in range(images)])


def test_the_random_maps_show_every_case():
    """A generator that never matched, missed or excused anything would make the test above worthless."""
    rng = np.random.default_rng(0)
    pairs = [random_pair(rng) for _ in range(200)]
    table = add_up([image_quality(*pair) for pair in pairs], CLASSES)
    assert (table.sum(0)[1:] > 30).all()
    excused = 0
    for truth, found in pairs:
        plain = panoptic(truth.pixels, truth.labels)
        excused += image_quality(truth, found) != image_quality(plain, found)
    assert excused > 30


def test_void_is_left_out_of_the_union():
    truth = panoptic([[1, 1, 1, 0, 0, 0, 0]], [0])
    found = panoptic([[0, 1, 1, 1, 1, 1, 1]], [0])  # 2 of 3 right, and four on void: 2 / (3 + 6 - 2 - 4) = 2/3
    assert image_quality(truth, found) == {0: (pytest.approx(2 / 3), 1, 0, 0)}


def test_a_prediction_mostly_on_void_or_on_a_crowd_of_its_class_is_not_wrong():
    truth = panoptic([[1, 1, 1, 1, 2, 2, 0, 0]], [0, 1], [True, False])
    assert image_quality(truth, panoptic([[1, 1, 1, 0, 0, 0, 0, 0]], [0])) == {1: (0, 0, 0, 1)}
    # Half is not more than half, and a crowd of another class excuses nothing.
    assert image_quality(truth, panoptic([[0, 0, 1, 1, 1, 1, 0, 0]], [0]))[0] == (0, 0, 1, 0)
    assert image_quality(truth, panoptic([[1, 1, 1, 0, 0, 0, 0, 0]], [2]))[2] == (0, 0, 1, 0)
    assert image_quality(truth, panoptic([[0, 0, 0, 0, 0, 1, 1, 1]], [3])) == {1: (0, 0, 0, 1)}


def test_an_iou_of_one_half_is_no_match():
    truth, found = panoptic([[1, 1, 2, 2]], [0, 1]), panoptic([[1, 0, 2, 2]], [0, 1])
    assert image_quality(truth, found) == {0: (0, 0, 1, 1), 1: (1, 1, 0, 0)}


def test_classes_nobody_shows_have_no_say():
    truth = panoptic([[1, 1, 2, 2]], [0, 3])
    table = add_up([image_quality(truth, truth)], CLASSES)
    metrics = quality_metrics(table, 3)
    assert metrics == {f"{name}{suffix}": 100.0 for suffix in ("", "_th", "_st") for name in ("PQ", "SQ", "RQ")}
    assert list(quality_by_class(table, list("abcde"))) == ["a", "d"]
    assert (
        quality_metrics(add_up([image_quality(panoptic([[1]], [0]), panoptic([[0]], []))], CLASSES), 3)["PQ_st"] == -1
    )


def test_codes_of_mmdet_become_segments():
    codes = np.array([[5, 5, 3], [1001, 2001, 3], [2001, 2000, 5]])
    found = from_codes(codes, void=5, base=1000)
    assert found.class_map(-1).tolist() == [[-1, -1, 3], [1, 1, 3], [1, 0, -1]]
    assert len(found.labels) == 4 and (found.pixels == 0).sum() == 3
    assert len({found.pixels[1, 0], found.pixels[1, 1], found.pixels[2, 1], found.pixels[0, 2]}) == 4


def test_ids_survive_the_png():
    ids = np.array([[0, 1, 255], [256, 65536, 256**3 - 1]])
    assert (segment_ids(encode_png(ids)) == ids).all() and encode_png(np.array([[256]])).tolist() == [[[0, 1, 0]]]


def half_of_the_images(seeds):
    from engine import distributed
    from engine.tasks.predicting import gather_predictions

    mine = [
        dict(image_id=seed, rows=image_quality(*random_pair(np.random.default_rng(seed))))
        for seed in seeds[distributed.rank() :: distributed.world_size()]
    ]
    everything = gather_predictions(mine, len(seeds))
    return None if everything is None else quality_metrics(add_up([p["rows"] for p in everything], CLASSES), 3)


def test_two_ranks_score_as_one(ranks):
    seeds = list(range(7))
    one, two = ranks.run(half_of_the_images, 1, seeds)[0], ranks.run(half_of_the_images, 2, seeds)[0]
    assert one == two == check([random_pair(np.random.default_rng(seed)) for seed in seeds])


@pytest.fixture(scope="module")
def sample():
    """The two real images as our loader reads them: truth by image id, and the classes."""
    from engine.config.schema import DataConfig, SplitConfig
    from engine.data.build import build_data

    files = SplitConfig(
        annotations=str(SAMPLE / "panoptic_examples.json"),
        images=str(SAMPLE / "input_images"),
        panoptic=str(SAMPLE / "panoptic_examples"),
    )
    train, val, classes = build_data(DataConfig(task="panoptic", train=files, val=files, scale=[320, 200], workers=0))
    samples = [val.dataset[index]["data_samples"] for index in range(len(val.dataset))]
    return {s.img_id: s.truth for s in samples}, classes, train


def codes_of(truth, void):
    """Truth as mmdet's fusion head would code it."""
    codes = np.concatenate([[void], truth.labels + 1000 * np.arange(1, len(truth.labels) + 1)])
    return codes[truth.pixels]


@needs_sample
def test_the_real_sample_is_read_as_its_files_say(sample):
    truths, classes, train = sample
    assert len(classes.things) == 80 and len(classes.stuff) == 53
    content = json.loads((SAMPLE / "panoptic_examples.json").read_text())
    names = {c["id"]: c["name"] for c in content["categories"]}
    for annotation in content["annotations"]:
        truth = truths[annotation["image_id"]]
        assert (truth.pixels == 0).sum() == (
            read_ids(SAMPLE / "panoptic_examples" / annotation["file_name"]) == 0
        ).sum()
        for place, segment in enumerate(annotation["segments_info"]):
            assert (truth.pixels == place + 1).sum() == segment["area"]
            assert classes.all[truth.labels[place]] == names[segment["category_id"]]
    things = {
        annotation["image_id"]: sum(s["category_id"] <= 90 and not s["iscrowd"] for s in annotation["segments_info"])
        for annotation in content["annotations"]
    }
    for index in range(len(train.dataset)):
        loaded = train.dataset[index]["data_samples"]
        assert len(loaded.gt_instances) == len(loaded.gt_instances.masks) == things[loaded.img_id] > 5


@needs_sample
def test_the_truth_of_the_real_sample_as_a_prediction_scores_100(sample):
    truths, classes, _ = sample
    pairs = [(truth, from_codes(codes_of(truth, 133), void=133, base=1000)) for truth in truths.values()]
    metrics = quality_metrics(add_up([image_quality(*pair) for pair in pairs], 133), 80)
    assert metrics == {name: pytest.approx(100) for name in metrics} and len(metrics) == 9


@needs_sample
def test_the_written_result_of_the_real_sample_read_as_data_scores_100(sample, tmp_path):
    """Through the maps that inference writes, as files, and back through the reader of the data set."""
    from engine.config.schema import DataConfig, SplitConfig
    from engine.data.build import build_data
    from engine.tasks.panoptic import Panoptic
    from engine.tasks.pictures import save_image

    truths, classes, _ = sample
    content = json.loads((SAMPLE / "panoptic_examples.json").read_text())
    content["annotations"] = []
    for image, truth in truths.items():
        found = from_codes(codes_of(truth, 133), void=133, base=1000)
        picture, segments = Panoptic(config=None).result(found, classes)
        save_image(tmp_path / f"{image}.png", picture)
        content["annotations"].append(dict(image_id=image, file_name=f"{image}.png", segments_info=segments))
    (tmp_path / "panoptic.json").write_text(json.dumps(content))
    files = SplitConfig(
        annotations=str(tmp_path / "panoptic.json"), images=str(SAMPLE / "input_images"), panoptic=str(tmp_path)
    )
    _, val, again = build_data(DataConfig(task="panoptic", train=files, val=files, scale=[320, 200], workers=0))
    read = {sample.img_id: sample.truth for sample in (val.dataset[k]["data_samples"] for k in range(len(val.dataset)))}
    assert again == classes and read.keys() == truths.keys()
    rows = [image_quality(truth, read[image]) for image, truth in truths.items()]
    metrics = quality_metrics(add_up(rows, 133), 80)
    assert metrics == {name: pytest.approx(100) for name in metrics} and len(metrics) == 9


@needs_sample
def test_a_spoilt_prediction_of_the_real_sample_scores_less_and_as_defined(sample):
    truths, classes, _ = sample
    pairs = []
    for truth in truths.values():
        codes = np.roll(codes_of(truth, 133), (4, 3), (0, 1))
        codes[:, 100:140] = 133
        codes[codes % 1000 == truth.labels[-1]] = 80  # one class taken for a stuff class
        pairs.append((truth, from_codes(codes, void=133, base=1000)))
    metrics = check(pairs, classes=133, things=80)
    assert 10 < metrics["PQ_th"] < 90 and 10 < metrics["PQ_st"] < 95 and metrics["PQ"] < 90
