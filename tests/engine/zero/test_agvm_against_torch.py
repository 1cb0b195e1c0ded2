"""With tau beyond the run, AGVMAdamW and AGVMSGD are torch's fused AdamW and SGD under the same DeepSpeed config."""

import torch
from agvm_harness import Case, Tiny, build, close, full_weights, take_step


def compare(case):
    """Largest difference of any weight at any step between the two, from the same seed."""
    options = {k: v for k, v in case.options().items() if k in ("lr", "weight_decay", "momentum", "nesterov")}
    torch_rule = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[case.rule]
    histories = []
    for make in (None, lambda groups: torch_rule(groups, fused=True, **options)):
        torch.manual_seed(1)
        engine, optimizer = build(case, Tiny(), make=make)
        history = []
        for step in range(1, 7):
            for group in optimizer.param_groups:
                group["lr"] = options["lr"] * step / 6  # the schedule owns the learning rate
            take_step(engine, case, step)
            history.append(full_weights(engine))
            assert {group["lr"] for group in optimizer.param_groups} == {options["lr"] * step / 6}
        histories.append(history)
        close(engine, optimizer)
    return max(float((a - b).abs().max()) for one, two in zip(*histories) for a, b in zip(one, two))


def compare_all(cases):
    return [compare(case) for case in cases]


def test_without_a_window_the_step_is_torchs(ranks):
    beyond = {"tau": 1000}
    cases = [Case(s, 2, rule=rule, agvm=beyond, clip_grad=0.3) for s in (0, 1, 2, 3) for rule in ("adamw", "sgd")]
    cases += [
        Case(0, 1, precision="bf16", agvm=beyond),
        Case(1, 1, precision="bf16", agvm=beyond),
        Case(2, 1, rule="sgd", agvm={**beyond, "nesterov": True}),
        Case(3, 1, agvm=beyond, zero={"offload_optimizer": {"device": "cpu"}, "sub_group_size": 50}),
    ]
    differences = ranks.run(compare_all, 2, cases)[0]
    assert differences == [0.0] * len(cases), list(zip(cases, differences))
