"""The sequence of samples: a function of seed and global batch alone, whoever computes it."""

import math
from itertools import islice

from hypothesis import assume, given
from hypothesis import strategies as st

from engine.config import BatchPlan
from engine.data.order import GlobalBatches, RankMicroBatches

SIZES, BATCHES, SEEDS = st.integers(1, 200), st.integers(1, 48), st.integers(0, 2**32)
FACTORS = st.integers(1, 5)


def epoch_of(batches, epoch):
    return [key for step in range(batches.steps_per_epoch) for key in batches[epoch * batches.steps_per_epoch + step]]


@given(SIZES, BATCHES, SEEDS, st.integers(0, 3))
def test_an_epoch_has_every_sample_once_and_is_filled_from_its_own_start(size, batch, seed, epoch):
    batches = GlobalBatches(size=size, batch=batch, seed=seed)
    assert batches.steps_per_epoch == math.ceil(size / batch)
    keys = epoch_of(batches, epoch)
    indices = [key.image for key in keys]
    assert len(keys) == batches.steps_per_epoch * batch
    assert sorted(indices[:size]) == list(range(size))
    # The fill repeats the epoch's first samples, several times where the batch is larger than the data set.
    assert indices[size:] == [indices[p % size] for p in range(size, len(indices))]
    # ... but each occurrence has random numbers of its own.
    assert len({(key.epoch, key.position) for key in keys}) == len(keys)
    assert {key.epoch for key in keys} == {epoch}


@given(SIZES, FACTORS, FACTORS, FACTORS, SEEDS, st.booleans(), st.data())
def test_ranks_and_accumulation_cut_one_and_the_same_global_batch(
    size, micro, accumulation, world, seed, grouped, data
):
    total = micro * accumulation * world
    landscape = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if grouped else None
    whole = GlobalBatches(size=size, batch=total, seed=seed, micro=micro, landscape=landscape)
    steps = whole.steps_per_epoch + 2  # into the next epoch
    shares = [
        RankMicroBatches(
            GlobalBatches(size=size, batch=total, seed=seed, micro=micro, landscape=landscape),
            BatchPlan(total, micro, accumulation, world),
            rank=rank,
            start=0,
            stop=steps,
        )
        for rank in range(world)
    ]
    assert {len(share) for share in shares} == {steps * accumulation}
    ranks = [list(share) for share in shares]
    for step in range(steps):
        micro_batches = [ranks[r][step * accumulation + k] for k in range(accumulation) for r in range(world)]
        assert all(len(micro_batch) == micro for micro_batch in micro_batches)
        assert [key for micro_batch in micro_batches for key in micro_batch] == whole[step]


@given(SIZES, FACTORS, FACTORS, st.integers(0, 20), SEEDS)
def test_a_start_in_the_middle_continues_the_same_sequence(size, micro, accumulation, start, seed):
    plan = BatchPlan(micro * accumulation * 2, micro, accumulation, 2)

    def share(start):
        return RankMicroBatches(
            GlobalBatches(size=size, batch=plan.total, seed=seed), plan, rank=1, start=start, stop=25
        )

    assert list(share(start)) == list(islice(share(0), start * accumulation, None))


@given(SIZES, FACTORS, st.integers(1, 12), SEEDS, st.data())
def test_grouping_by_aspect_sorts_inside_a_global_batch_and_keeps_its_halves_alike(size, micro, count, seed, data):
    landscape = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    plain = GlobalBatches(size=size, batch=micro * count, seed=seed)
    grouped = GlobalBatches(size=size, batch=micro * count, seed=seed, micro=micro, landscape=landscape)
    for step in range(plain.steps_per_epoch):
        keys = grouped[step]
        assert sorted(keys) == sorted(plain[step])
        flags = [[landscape[key.image] for key in keys[j * micro : (j + 1) * micro]] for j in range(count)]
        assert sum(len(set(own)) > 1 for own in flags) <= 1  # one micro-batch at most has both
        first, second = flags[: (count + 1) // 2], flags[(count + 1) // 2 :]
        assert abs(sum(map(all, first)) - sum(map(all, second))) <= 1


@given(st.integers(30, 200), BATCHES, SEEDS, SEEDS)
def test_seeds_and_epochs_shuffle_differently(size, batch, one, other):
    assume(one != other)
    first = GlobalBatches(size=size, batch=batch, seed=one)
    orders = [
        [key.image for key in epoch_of(batches, epoch)][:size]
        for batches in (first, GlobalBatches(size=size, batch=batch, seed=other))
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4  # two of 30! orders do not meet by chance
    assert [key.image for key in epoch_of(first, 0)][:size] == orders[0]  # and going back finds the same
