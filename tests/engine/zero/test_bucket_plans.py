"""Plans move every element of every gradient to its owner, for any sizes, world and bucket size."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.zero.buckets import make_plan
from engine.zero.companion import Lane
from engine.zero.geometry import Replicas, Sharding


def chunks(sizes, world, rank):
    return Replicas(sizes, world, rank)


def partitions(sizes, world, rank):
    return Sharding(stage=2, world=world).geometry(sizes, [0] * len(sizes), rank)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    world=st.integers(1, 7),
    bucket_size=st.integers(1, 60),
    kind=st.sampled_from([chunks, partitions]),
    seed=st.integers(0, 1000),
)
def test_every_element_reaches_its_owner_and_no_bucket_is_too_large(sizes, world, bucket_size, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    gradients = [[torch.rand(n, generator=generator, dtype=torch.float64) for n in sizes] for _ in range(world)]
    plans = [make_plan(kind(sizes, world, rank), order, bucket_size) for rank in range(world)]
    total = [sum(g[i] for g in gradients) for i in range(len(sizes))]
    covered = [torch.zeros(n) for n in sizes]
    for rank, plan in enumerate(plans):
        assert [b.segments for b in plan.buckets] == [b.segments for b in plans[0].buckets]
        fragments = kind(sizes, world, rank).fragments
        partition = torch.full((plan.numel,), torch.nan, dtype=torch.float64)
        for b, bucket in enumerate(plan.buckets):
            assert bucket.numel <= max(bucket_size // 2, world)
            reduced = torch.zeros(bucket.numel, dtype=torch.float64)
            for sender in range(world):
                for i, blocks in plans[sender].buckets[b].blocks.items():
                    for block in blocks:
                        block.write(reduced).add_(block.read(gradients[sender][i]))
            own = next((reduced[a : a + n] for owner, a, n in bucket.segments if owner == rank), reduced[:0])
            for offset, home, length in bucket.runs:
                partition[home : home + length] = own[offset : offset + length]
            for k, start, stop, offset in bucket.spans:
                f = fragments[k]
                expected = total[f.param][f.start + start : f.start + stop]
                assert torch.allclose(own[offset : offset + stop - start], expected)
                covered[f.param][f.start + start : f.start + stop] += 1
        # The partition is what this rank owns, fragment after fragment.
        owned = [total[f.param][f.start : f.stop] for f in fragments]
        assert torch.allclose(partition, torch.cat(owned) if owned else partition)
        assert plan.homes == [sum(len(x) for x in owned[:k]) for k in range(len(owned))]
    assert all((c == 1).all() for c in covered)


class Receiving:
    """A route that needs as much room to receive as it sends."""

    def scratch(self, numel):
        return numel


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=8), bucket_size=st.integers(8, 300))
def test_the_buffers_of_a_lane_are_two_buckets(sizes, bucket_size):
    geometry = partitions(sizes, 3, 0)
    plan = make_plan(geometry, range(len(sizes)), bucket_size)
    lane = Lane(plan, torch.zeros(plan.numel), [Receiving()], dtype=torch.float32)
    lane.allocate(geometry, torch.device("cpu"))
    assert sum(t.numel() for t in lane.buffers + lane.scratch) <= 2 * bucket_size + 4 * 3  # and a slice's rounding
