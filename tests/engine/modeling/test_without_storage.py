"""A model built without storage is, once filled, the model built as usual; it was never whole in fp32."""

import torch
from torch import nn

from engine.modeling.without_storage import give_storage, parameters_on_meta


class Net(nn.Module):
    """A tied parameter, one that a plain list holds too, a table that is in no state dict, and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale.was_scalar = True
        self.held = [self.scale]
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.anchors = torch.arange(6.0)
        self.norm = nn.BatchNorm1d(5)


def test_parameters_have_no_storage_until_they_get_it():
    with parameters_on_meta():
        net = Net()
    assert all(parameter.is_meta for parameter in net.parameters())
    assert torch.equal(net.table, torch.arange(4.0)) and torch.equal(net.anchors, torch.arange(6.0))
    net.to(torch.bfloat16)
    give_storage(net, torch.device("cpu"))
    assert all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in net.parameters())
    assert net.second.weight is net.first.weight and net.held[0] is net.scale
    assert net.scale.was_scalar and not net.scale.requires_grad and net.first.weight.requires_grad
    net.load_state_dict(Net().state_dict())
    assert torch.equal(net.table, torch.arange(4.0).bfloat16())
    assert not nn.Linear(2, 2).weight.is_meta  # the next build is as usual


def plain_copies(changes):
    """A ZeRO-3 run's copy for evaluation, against one that is built as usual; and whether fp32 ever was whole."""
    import tempfile

    from tiny_run import merged

    from engine import distributed
    from engine.modeling.build import build_model
    from engine.recipes.load import parse_config
    from engine.tasks.registry import task_of
    from engine.train import evaluate
    from engine.train.build import build_run
    from engine.zero.whole_parameters import whole_state

    folder = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    run = build_run(parse_config(merged({"run": {"work_dir": folder}}, merged(changes))))
    real, build = [], evaluate.build_model

    def building(*args, **kwargs):
        model = build(*args, **kwargs)
        real.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return model

    evaluate.build_model = building
    try:
        copy = evaluate.plain_model(run)
    finally:
        evaluate.build_model = build
    usual = build_model(task_of(run.config), run.classes, empty=True).to(run.precision.dtype)
    for name, value in whole_state(run.engine.module):
        usual.state_dict()[name].copy_(value)
    ours, theirs = (
        {**dict(m.named_parameters(remove_duplicate=False)), **dict(m.named_buffers())} for m in (copy, usual)
    )
    same = [n for n in theirs if torch.equal(ours[n], theirs[n]) and ours[n].dtype == theirs[n].dtype]
    run.engine.destroy()
    return real, sorted(set(theirs) - set(same)), ours.keys() == theirs.keys()


def test_the_copy_for_evaluation_is_the_model_and_never_whole_in_fp32(ranks):
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    assert ranks.run(plain_copies, 2, bf16) == [([0], [], True)] * 2
