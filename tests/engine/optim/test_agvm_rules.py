"""The update rules are torch's, whatever the sizes, and a new rule is a small class."""

import pytest
import torch

import engine.optim.agvm_adamw
import engine.optim.agvm_sgd
from engine.optim import AGVMSGD, AGVMAdamW, AGVMOptimizer
from engine.optim.rule import pieces


def train(make, steps=5):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(n)) for n in (1, 7, 100)] + [torch.nn.Parameter(torch.randn(5, 4))]
    optimizer = make([{"params": weights[:2], "module": "backbone"}, {"params": weights[2:], "module": "head"}])
    for _ in range(steps):
        for w in weights:
            w.grad = torch.randn(w.shape)
        weights[1].grad = None
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("batch", [3, 1 << 22, None])
@pytest.mark.parametrize(
    "ours, torchs, options",
    [
        (AGVMAdamW, torch.optim.AdamW, dict(lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5)),
        (AGVMSGD, torch.optim.SGD, dict(lr=0.1, weight_decay=0.3, momentum=0.7)),
        (AGVMSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.7, nesterov=True)),
        (AGVMSGD, torch.optim.SGD, dict(lr=0.1, momentum=0.0)),
    ],
)
def test_a_rule_is_torchs_in_batches_of_any_size(monkeypatch, batch, ours, torchs, options):
    """Without batches (None) it is torch's fused one."""
    for module in (engine.optim.agvm_adamw, engine.optim.agvm_sgd):
        if batch is not None:
            monkeypatch.setattr(module, "BATCH", batch)
            monkeypatch.setattr(module, "can_fuse", lambda *tensors: False)
    mine, optimizer = train(lambda groups: ours(groups, **options))
    theirs, reference = train(lambda groups: torchs(groups, fused=batch is None, **options))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    for a, b in zip(mine, theirs):
        assert set(optimizer.state.get(a, {})) == {k for k, v in reference.state.get(b, {}).items() if v is not None}
        if "step" in optimizer.state.get(a, {}):
            assert type(optimizer.state[a]["step"]) is int


def test_dampening_starts_the_buffer_at_zero():
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = AGVMSGD([{"params": [w], "module": "backbone"}], lr=1.0, momentum=0.9, dampening=0.9)
    w.grad = torch.ones(1)
    optimizer.step()
    assert float(w.detach()) == pytest.approx(-0.1)


def test_mu_multiplies_the_step_and_leaves_the_schedule_alone():
    w = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = AGVMSGD([{"params": [w[0]], "module": "backbone"}, {"params": [w[1]], "module": "head"}], lr=0.5)
    optimizer.modulator.mu["head"] = 3.0
    for x in w:
        x.grad = torch.ones(1)
    optimizer.step()
    assert [float(x.detach()) for x in w] == [-0.5, -1.5] and [g["lr"] for g in optimizer.param_groups] == [0.5, 0.5]


def test_a_third_rule_needs_two_methods():
    class AGVMSign(AGVMOptimizer):
        def update(self, group, params, lr):
            for p in params:
                p.sub_(p.grad.sign(), alpha=lr)

        def preconditioner(self, group, state, g):
            return 1 / (g * g + 1e-8)

    w = torch.nn.Parameter(torch.zeros(2))
    optimizer = AGVMSign([{"params": [w], "module": "backbone"}], dict(lr=0.1))
    w.grad = torch.tensor([2.0, -3.0])
    optimizer.step()
    assert w.tolist() == pytest.approx([-0.1, 0.1])
    assert optimizer.companion == "signed"
    assert torch.isfinite(optimizer.sums(optimizer.param_groups[0], {}, w.grad.double(), w.grad.double())).all()


def test_pieces_cover_everything_once():
    tensors = [torch.arange(n) for n in (5, 1, 12, 3)]
    got = [(i, x) for index, (batch,) in pieces(4, tensors) for i, x in zip(index, batch)]
    for i, tensor in enumerate(tensors):
        assert torch.equal(torch.cat([x for k, x in got if k == i]), tensor)
    assert max(x.numel() for _, x in got) <= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda g: AGVMAdamW(g, lr=-1),
        lambda g: AGVMAdamW(g, betas=(1.0, 0.9)),
        lambda g: AGVMSGD(g, lr=1, momentum=-1),
        lambda g: AGVMSGD(g, lr=1, momentum=0, nesterov=True),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make([{"params": [torch.nn.Parameter(torch.zeros(1))], "module": "backbone"}])
