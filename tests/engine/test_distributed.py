"""Ranks find each other under every launcher and agree on small things."""

import pytest
import torch

from engine import distributed


def agree():
    total = distributed.sum_over_ranks(torch.tensor([distributed.rank() + 1]))
    gathered = distributed.gather_objects({"rank": distributed.rank()})
    return int(total), gathered, distributed.broadcast_object(distributed.rank() + 7), distributed.world_size()


@pytest.mark.parametrize("world", [2, 3, 1])
def test_ranks_agree_at_changing_world_sizes(ranks, world):
    answers = ranks.run(agree, world)
    total = world * (world + 1) // 2
    assert [a[0] for a in answers] == [total] * world
    assert answers[0][1] == [{"rank": r} for r in range(world)]
    assert all(a[1] is None for a in answers[1:])
    assert [a[2:] for a in answers] == [(7, world)] * world


def fail_on_rank_one():
    if distributed.rank() == 1:
        raise ValueError("rank one says no")
    distributed.barrier()


def test_a_failing_rank_is_reported_and_the_pool_recovers(ranks):
    with pytest.raises(AssertionError, match="rank one says no"):
        ranks.run(fail_on_rank_one, 2)
    assert ranks.run(agree, 2)[0][0] == 3
