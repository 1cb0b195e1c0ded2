"""What a training step costs beside its computation: messages between ranks, and reads for which the host waits.

Both are counted on CPU ranks, where they are the same as on GPUs. A number that grows here costs every step of every
run: on hundreds of GPUs a ring of gloo takes tens of milliseconds, and a read drains the device.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_run import TINY, merged

from engine import distributed
from engine.data.device_feed import DeviceFeed
from engine.monitoring.deferred import Deferred
from engine.monitoring.live import step_text

ROOT = Path(__file__).parents[3]
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")


class Watched:
    """Counts reads of tensors and messages by code of ours; those of torch, mmdet and DeepSpeed are theirs."""

    def __init__(self):
        self.counts = Counter()
        self._before = {}

    def _note(self, what):
        frame = sys._getframe(2)
        while frame is not None and f"{Path(torch.__file__).parent}/" in frame.f_code.co_filename:
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "engine") or file.is_relative_to(ROOT / "models"):
            self.counts[what, file.name] += 1

    def __enter__(self):
        def spied(owner, name, what):
            original = getattr(owner, name)
            self._before[owner, name] = original

            def call(*args, **kwargs):
                group = kwargs.get("group")
                self._note("gloo message" if group is not None and group is distributed._control_group else what)
                return original(*args, **kwargs)

            setattr(owner, name, call)

        for name in READS:
            spied(torch.Tensor, name, "read")
        for name in ("all_reduce", "broadcast", "gather_object", "all_gather_object", "broadcast_object_list"):
            spied(dist, name, "message")
        return self

    def __exit__(self, *_):
        for (owner, name), original in self._before.items():
            setattr(owner, name, original)

    def take(self):
        counts, self.counts = self.counts, Counter()
        return counts


def counted_steps(changes):
    """What each step of a run costs."""
    import contextlib
    import io
    import tempfile

    from engine.recipes.load import parse_config
    from engine.train import loop

    folder = distributed.broadcast_object(tempfile.mkdtemp(prefix="gigadet-run-"))
    run = loop.build_run(parse_config(merged({"run": {"work_dir": folder}}, merged(changes))))
    steps, keep = [], loop.Journal.keep
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), Watched() as watched:

        def noted(self, *args):
            steps.append(watched.take())
            keep(self, *args)

        loop.Journal.keep, finish = noted, loop.finish_report
        loop.finish_report = lambda work_dir: None
        try:
            loop.run_schedule(run)
        finally:
            loop.Journal.keep, loop.finish_report = keep, finish
            run.engine.destroy()
    return [dict(step) for step in steps]


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 2), (3, 1)])
def test_one_message_and_one_read_in_each_micro_step(ranks, stage, accumulation):
    steps = ranks.run(
        counted_steps,
        2,
        {
            "train_batch_size": 2 * accumulation,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AGVMSGD", "params": {"lr": 0.01, "momentum": 0.9, "tau": 100}},
            "schedule": {"steps": 4},
        },
    )[0]
    for step in steps[1:]:  # in the first one, ranks agree on the names of losses and on the order of gradients
        assert step == {
            ("message", "distributed.py"): accumulation,  # on the accelerator's backend
            ("read", "complete_gradients.py"): accumulation,
            ("read", "deferred.py"): 1,  # the gradient norm of the step before
        }


def test_a_loss_that_comes_later_is_recorded_from_then_on():
    from engine.train.forward import Notices, TrainingForward

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.names = ["a"]

        def loss(self, images, samples):
            return {name: self.weight * k for k, name in enumerate(self.names, 1)}

        def parse_losses(self, losses):
            return sum(losses.values()), losses

    class Plain:
        dtype, half = torch.float32, False

        def autocast(self, device):
            import contextlib

            return contextlib.nullcontext()

    model = Model()
    forward = TrainingForward(
        model, lambda batch, training: (None, None), Plain(), torch.device("cpu"), over_ranks=False
    )
    forward({})
    assert forward.record.losses == {"a": 1.0} and forward.record.told == Notices()
    model.names = ["a", "b"]
    forward({})
    assert forward.record.losses == {"a": 1.0} and forward.record.told.unnamed
    forward({})
    assert forward.record.losses == {"a": 1.0, "b": 2.0} and not forward.record.told.unnamed


def test_the_feed_has_the_next_batch_and_counts_the_waiting():
    import time

    def slow():
        for k in range(3):
            time.sleep(0.05)
            yield {"inputs": [torch.full((3, 2, 2), k, dtype=torch.uint8)]}

    feed = DeviceFeed(slow(), torch.device("cpu"))
    feed.waited_since()
    assert feed.next["inputs"][0][0, 0, 0] == 0
    assert feed.take()["inputs"][0].max() == 0 and feed.next["inputs"][0].max() == 1
    assert 0.04 < feed.waited_since() < 1 and feed.waited_since() == 0
    feed.take(), feed.take()
    assert feed.next is None


def test_the_line_says_when_a_step_waits_for_data():
    record = {"epoch": 1, "loss": 1.0, "lr": 0.1, "images_per_second": 2, "memory_gb": 1, "seconds": 2.0}
    assert "waiting" not in step_text({**record, "data_seconds": 0.09})
    assert "waiting for data 50%" in step_text({**record, "data_seconds": 1.0})


def test_a_deferred_number():
    assert Deferred(None).read() is None
    assert Deferred(2.5).read() == Deferred(torch.tensor(2.5)).read() == 2.5


def test_images_leave_the_loader_as_bytes():
    """They are normalised on the device: four times fewer bytes are copied."""
    from engine.data.loader import training_loader
    from engine.data.order import GlobalBatches, RankMicroBatches
    from engine.recipes.load import parse_config
    from engine.tasks.registry import task_of

    config = parse_config(TINY)
    train, *_ = task_of(config).build_data()
    from engine.config import solve_batch

    plan = solve_batch({**config.deepspeed, "gradient_accumulation_steps": 4}, 1)
    batches = GlobalBatches(size=len(train.dataset), batch=plan.total, seed=0, micro=plan.micro, landscape=None)
    loader = training_loader(train.dataset, 0, RankMicroBatches(batches, plan, rank=0, start=0, stop=1), workers=0)
    assert next(iter(loader))["inputs"][0].dtype == torch.uint8
