"""Ranks find each other under every launcher and agree on small things."""

import os

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


SLURM = {
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4242",
    "SLURM_NODELIST": "gpu[003-010,015]",
}


def test_slurm_variables_become_a_rendezvous(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(SLURM))
    distributed.adopt_launcher_environment()
    assert [os.environ[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")] == ["9", "16", "1", "gpu003"]
    assert os.environ["MASTER_PORT"] == "24242"


def test_a_plain_process_is_a_world_of_one(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    distributed.adopt_launcher_environment()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
