"""DINO, Mask2Former and YOLOX: the same weights at every stage and on any number of ranks, and after a stop.

mmdet averages what their losses are divided by over the ranks; here that is an option.
"""

import pytest
from resumed_run import results, same, settings, straight_and_broken
from tiny_detectors import detector
from tiny_run import difference, merged, train_tiny

STEPS = {"schedule": {"steps": 2}}


def runs(name, cases):
    return [train_tiny(merged(changes, merged(STEPS, detector(name))))["weights"] for changes in cases]


# YOLOX sums its losses over all boxes: rounding is larger beside its gradients.
@pytest.mark.parametrize("name, bound", [("dino", 1e-6), ("mask2former", 1e-6), ("yolox", 1e-5)])
def test_ranks_and_stages_reach_the_same_weights(ranks, name, bound):
    (alone,) = ranks.run(runs, 1, name, [{}])[0]
    stages = [{"zero_optimization": {"stage": stage}} for stage in (1, 3)]
    averaged = {"detector": {"normaliser": "ranks"}}
    *together, over_ranks = ranks.run(runs, 2, name, [*stages, averaged])[0]
    for weights in together:
        assert difference(alone, weights) < bound
    # mmdet's own way: how many objects the other rank has at the moment changes the gradient.
    assert difference(alone, over_ranks) > 10 * bound


def interrupted(name, stage):
    changes = merged({"schedule": {"steps": 4, "warmup_steps": 1}}, settings("AGVMAdamW", stage, **detector(name)))
    straight, broken = straight_and_broken(changes, [2])
    return same(straight["weights"], broken["weights"]), results(straight) == results(broken)


@pytest.mark.parametrize("name,stage", [("dino", 3), ("mask2former", 2)])
def test_interrupted_is_uninterrupted(ranks, name, stage):
    assert ranks.run(interrupted, 2, name, stage)[0] == (True, True)
