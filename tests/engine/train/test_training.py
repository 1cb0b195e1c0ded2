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


def test_a_run_learns_something(ranks):
    (result,) = ranks.run(runs, 1, [{"schedule": {"steps": 12, "warmup_steps": 0}}])[0]
    losses = [record["loss"] for record in result["records"]]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])  # an epoch has three steps


def test_every_step_is_on_record(reference):
    assert [record["step"] for record in reference["records"]] == [1, 2, 3]
    assert reference["records"][0]["lr"] == pytest.approx(1e-5)
    assert reference["records"][-1]["lr"] == pytest.approx(1e-2)
    assert all(
        record["loss"] == pytest.approx(record["loss_cls"] + record["loss_bbox"], rel=1e-5)
        for record in reference["records"]
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stages_and_world_sizes_reach_the_same_weights(ranks, reference, world):
    for stage, result in enumerate(ranks.run(runs, world, STAGES)[0]):
        assert difference(reference["weights"], result["weights"]) < 1e-6, f"stage {stage} on {world} ranks"
        for mine, theirs in zip(result["records"], reference["records"]):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_gradients_reduced_during_backward_give_the_same_weights(ranks, reference):
    """As the recipes ask for it, in many buckets."""
    zero = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5000}
    result = ranks.run(runs, 2, [{"zero_optimization": zero}])[0][0]
    assert difference(reference["weights"], result["weights"]) < 1e-6


def test_workers_and_repetition_change_nothing(ranks, reference):
    again, with_workers = ranks.run(runs, 1, [{}, {"data": {"workers": 2}}])[0]
    assert difference(reference["weights"], again["weights"]) == 0
    assert difference(reference["weights"], with_workers["weights"]) == 0


def test_another_seed_gives_other_weights(ranks, reference):
    other = ranks.run(runs, 1, [{"run": {"seed": 4}}])[0][0]
    assert difference(reference["weights"], other["weights"]) > 1e-2


def refusals():
    from engine.errors import ConfigError
    from engine.zero.settings import check_deepspeed

    triangle = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    check_deepspeed({**triangle, "zero_optimization": {"stage": 2}})
    messages = []
    for keys in ({"zero_optimization": {"stge": 2}}, {"zero_optimization": {"overlap_comm": "maybe"}}, {"timers": 3}):
        with pytest.raises(ConfigError) as caught:
            check_deepspeed({**triangle, **keys})
        messages.append(str(caught.value))
    return messages


def test_what_deepspeed_refuses_is_told_in_one_sentence_before_anything_is_built(ranks):
    typo, value, kind = ranks.run(refusals, 1)[0]
    assert '"stge" in zero_optimization' in typo and '"overlap_comm" in zero_optimization' in value
    assert "does not accept timers, which is 3" in kind
    assert not any("\n" in message for message in (typo, value, kind))


def test_a_work_dir_with_records_is_refused_and_one_that_failed_early_is_not(tmp_path):
    from tiny_run import TINY, merged

    from engine.errors import ConfigError
    from engine.recipes.load import parse_config
    from engine.train.work_dir import open_work_dir

    config = parse_config(merged({"run": {"work_dir": str(tmp_path)}}, TINY))
    assert open_work_dir(config, None) == (tmp_path.resolve(), None) == open_work_dir(config, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        open_work_dir(config, None)
