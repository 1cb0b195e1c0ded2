"""mIoU, mAcc and aAcc against pixel-by-pixel counting."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tasks.mean_iou import add_up, image_areas, iou_by_class, iou_metrics

CLASSES, IGNORED = 6, 255


def counted(pairs):
    right, real, guess = Counter(), Counter(), Counter()
    for truth, found in pairs:
        for t, f in zip(truth.ravel().tolist(), found.ravel().tolist()):
            if t != IGNORED:
                real[t] += 1
                guess[f] += 1
                right[t] += t == f
    shown = sorted(set(real) | set(guess))
    ious = [right[c] / (real[c] + guess[c] - right[c]) for c in shown]
    accuracies = [right[c] / real[c] for c in shown if real[c]]
    return {
        "mIoU": 100 * sum(ious) / len(ious),
        "mAcc": 100 * sum(accuracies) / len(accuracies),
        "aAcc": 100 * sum(right.values()) / sum(real.values()),
    }


def random_pair(rng):
    truth = rng.integers(0, CLASSES - 1, (5, 7)).astype(np.uint8)
    found = np.where(rng.random(truth.shape) < 0.6, truth, rng.integers(0, CLASSES, truth.shape)).astype(np.uint8)
    return np.where(rng.random(truth.shape) < 0.2, IGNORED, truth).astype(np.uint8), found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_random_maps_score_as_counting_says(seed, images):
    rng = np.random.default_rng(seed)
    pairs = [random_pair(rng) for _ in range(images)]
    table = add_up([image_areas(*pair, ignored=IGNORED) for pair in pairs], CLASSES)
    assert iou_metrics(table) == pytest.approx(counted(pairs), abs=1e-9)


def test_the_truth_scores_100_and_ignored_pixels_do_not_count():
    truth = np.array([[0, 0, 3], [IGNORED, IGNORED, 3]], np.uint8)
    for nonsense in (1, 5):
        found = np.where(truth == IGNORED, nonsense, truth)
        table = add_up([image_areas(truth, found, ignored=IGNORED)], CLASSES)
        assert iou_metrics(table) == {"mIoU": 100.0, "mAcc": 100.0, "aAcc": 100.0}
        assert iou_by_class(table, list("abcdef")) == {
            "a": {"IoU": 100.0, "Acc": 100.0},
            "d": {"IoU": 100.0, "Acc": 100.0},
        }


def test_a_class_that_only_the_prediction_has_costs_iou_and_not_accuracy():
    truth, found = np.zeros((1, 4), np.uint8), np.array([[0, 0, 0, 2]], np.uint8)
    table = add_up([image_areas(truth, found, ignored=IGNORED)], CLASSES)
    assert iou_metrics(table) == {"mIoU": 37.5, "mAcc": 75.0, "aAcc": 75.0}
    assert iou_by_class(table, list("abcdef"))["c"] == {"IoU": 0.0}


def test_without_any_labelled_pixel_there_is_no_score():
    truth = np.full((2, 2), IGNORED, np.uint8)
    table = add_up([image_areas(truth, np.zeros_like(truth), ignored=IGNORED)], CLASSES)
    assert iou_metrics(table) == {"mIoU": -1.0, "mAcc": -1.0, "aAcc": -1.0}
