"""The same run on other ranks, stages and workers reaches the same weights."""

import pytest
from tiny_run import difference, train_tiny


def runs(cases):
    return [train_tiny(changes) for changes in cases]


STAGES = [{"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)]


@pytest.fixture(scope="module")
def reference(ranks):
    """One rank, four accumulated micro-batches, stage 0."""
    return ranks.run(runs, 1, [{}])[0][0]


def test_a_run_learns_something_and_records_every_step(reference):
    assert [record["step"] for record in reference["records"]] == [1, 2, 3]
    assert reference["records"][0]["lr"] == pytest.approx(1e-5)
    assert reference["records"][-1]["lr"] == pytest.approx(1e-2)
    assert reference["records"][-1]["loss"] < reference["records"][0]["loss"]
    assert all(record["loss"] == pytest.approx(record["loss_cls"] + record["loss_bbox"], rel=1e-5)
               for record in reference["records"])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stages_and_world_sizes_reach_the_same_weights(ranks, reference, world):
    for stage, result in enumerate(ranks.run(runs, world, STAGES)[0]):
        assert difference(reference["weights"], result["weights"]) < 1e-6, f"stage {stage} on {world} ranks"
        for mine, theirs in zip(result["records"], reference["records"]):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_workers_and_repetition_change_nothing(ranks, reference):
    again, with_workers = ranks.run(runs, 1, [{}, {"data": {"workers": 2}}])[0]
    assert difference(reference["weights"], again["weights"]) == 0
    assert difference(reference["weights"], with_workers["weights"]) == 0


def test_another_seed_gives_other_weights(ranks, reference):
    other = ranks.run(runs, 1, [{"run": {"seed": 4}}])[0][0]
    assert difference(reference["weights"], other["weights"]) > 1e-2
