"""The planned layout is DeepSpeed's on real ranks, and covers every element once at any number of ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.errors import ConfigError
from engine.planning.model_facts import Parameter, plan_shards
from engine.zero.geometry import Sharding

WORLDS = (1, 2, 3, 7, 480, 481)
CASES = [
    dict(stage=0),
    dict(stage=0, dtype="bfloat16"),
    dict(stage=1),
    dict(stage=1, dtype="bfloat16", fp32_sums=True),
    dict(stage=2, dtype="bfloat16"),
    dict(stage=2, round_robin_gradients=True),
    dict(stage=2, parameter_alignment=True),
    dict(stage=3),
    dict(stage=3, dtype="bfloat16", sub_group_size=40),
]


class Tiny(nn.Module):
    """Odd sizes, so that no number of ranks divides them, and one parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(27, 13), nn.LayerNorm(13), nn.Linear(13, 11))
        self.neck = nn.Linear(11, 11)
        self.head = nn.ModuleDict({"box": nn.Linear(11, 5), "score": nn.Linear(11, 1, bias=False)})
        self.head["score"].weight.requires_grad_(False)


def layouts_on_rank(cases):
    import deepspeed
    import torch
    import torch.distributed as dist

    from engine.optim import module_groups
    from engine.planning.model_facts import parameters_of
    from engine.zero.layout import layout_of

    found = []
    for case in cases:
        case = dict(case)
        fp32_sums = case.pop("fp32_sums", False)
        torch.manual_seed(0)
        model = Tiny()
        optimizer = torch.optim.AdamW(module_groups(model, no_decay=True), lr=1e-3)
        parameters = parameters_of(model, optimizer.param_groups)
        zero = {key: value for key, value in case.items() if key != "dtype"}
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": case.get("dtype") == "bfloat16"},
                "zero_optimization": zero,
                **({"data_types": {"grad_accum_dtype": "fp32"}} if fp32_sums else {}),
            },
        )
        real = layout_of(engine)
        planned = plan_shards(parameters, Sharding(world=dist.get_world_size(), **case), dist.get_rank())
        groups = [real.group, [p.group for p in planned.parameters]]
        found.append(
            [
                (
                    type(geometry).__name__,
                    geometry.fragments,
                    geometry.held(),
                    group,
                    [geometry.ranges(i) for i in range(len(group))],
                    geometry.shard_sizes(),
                    real.keeps_local == (case["stage"] < 2),
                )
                for geometry, group in zip((real.geometry, planned.geometry), groups)
            ]
        )
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_plan_is_what_deepspeed_does(ranks, world):
    for rank, found in enumerate(ranks.run(layouts_on_rank, world, CASES)):
        for case, (real, planned) in zip(CASES, found):
            assert planned == real, (rank, case)


def parameters(sizes, groups):
    used = sorted(set(groups))
    return [
        Parameter(f"p{i}", n, f"module{used.index(g)}", used.index(g)) for i, (n, g) in enumerate(zip(sizes, groups))
    ]


models = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 2)), min_size=1, max_size=12).map(
    lambda pairs: parameters(*zip(*pairs))
)


@settings(max_examples=200, deadline=None)
@given(
    model=models,
    world=st.sampled_from(WORLDS),
    stage=st.sampled_from([0, 1, 2, 3]),
    round_robin=st.booleans(),
    aligned=st.booleans(),
    small=st.booleans(),
)
def test_every_element_has_one_owner(model, world, stage, round_robin, aligned, small):
    sharding = Sharding(
        stage=stage,
        world=world,
        round_robin_gradients=round_robin,
        parameter_alignment=aligned,
        sub_group_size=100 if small else 10**9,
    )
    planned = plan_shards(model, sharding)
    layout = planned.geometry
    assert sorted(planned.order) == list(range(len(model)))
    for i in range(len(model)):
        owners, starts, stops = zip(*layout.ranges(i))
        assert starts[0] == 0 and stops[-1] == layout.numels[i] and starts[1:] == stops[:-1]
        assert all(start < stop for start, stop in zip(starts, stops))
        assert list(owners) == sorted(set(owners)) and owners[0] >= 0 and owners[-1] < world
    counts = planned.elements()
    assert sum(map(sum, counts.values())) == sum(p.numel for p in model)
    total = sum(p.numel for p in model)
    if stage in (1, 2):
        groups = len(layout.shard_sizes())
        assert all(size % 2 == 0 for size in layout.shard_sizes())
        gaps = 3 * len(model) if aligned else 0
        assert (
            0 <= layout.padding() < 2 * world * groups + gaps
            and sum(layout.shard_sizes()) * world == total + layout.padding()
        )
    elif stage == 3:
        assert 0 <= layout.padding() < world * len(model)
        assert max(max(c) for c in counts.values()) <= sum(layout.chunk(i) for i in range(len(model)))


@settings(max_examples=60, deadline=None)
@given(model=models, world=st.sampled_from((1, 3, 7)), stage=st.sampled_from([1, 2, 3]), small=st.booleans())
def test_fragments_fill_each_rank_without_overlap(model, world, stage, small):
    sharding = Sharding(stage=stage, world=world, sub_group_size=100 if small else 10**9)
    seen = {i: [] for i in range(len(model))}
    for rank in range(world):
        layout = plan_shards(model, sharding, rank).geometry
        ends = {}
        for f in sorted(layout.fragments, key=lambda f: (f.shard, f.offset)):
            assert f.offset >= ends.get(f.shard, 0)  # in its shard, after the one before
            ends[f.shard] = f.offset + f.stop - f.start
            seen[f.param].append((f.start, f.stop))
        if stage < 3:
            assert all(ends[k] <= layout.shard_sizes()[k] for k in ends)
    for i, pieces in seen.items():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == layout.numels[i]
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:]))


def test_shares_of_a_module_by_hand():
    model = [Parameter("a", 10, "backbone", 0), Parameter("b", 3, "head", 1), Parameter("c", 100, "head", None)]
    flat = {s.module: s for s in plan_shards(model, Sharding(stage=2, world=4)).module_shares()}
    # 10 elements in four pieces of 4: 4, 4, 2, 0; 3 elements in four of 2: 2, 1, 0, 0.
    assert flat["backbone"] == ("backbone", 10, 0, 2.5, 4, 1) and flat["head"] == ("head", 3, 0, 0.75, 2, 2)
    chunks = {s.module: s for s in plan_shards(model, Sharding(stage=3, world=4)).module_shares()}
    assert chunks["backbone"] == ("backbone", 10, 1, 2.5, 3, 0) and chunks["head"].empty == 1
    whole = {s.module: s for s in plan_shards(model, Sharding(stage=0, world=4)).module_shares()}
    assert whole["backbone"] == ("backbone", 10, 10, 10.0, 10, 0)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(stage=4, world=2), "stage must be 0, 1, 2 or 3, got 4"),
        (dict(stage=2, world=0), "number of ranks must be a whole number >= 1, got 0"),
        (dict(stage=2, world=2.5), "number of ranks must be a whole number >= 1, got 2.5"),
    ],
)
def test_wrong_settings_are_one_sentence(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Sharding(**wrong)
