"""What a window and a layer-wise step cost does not grow with the number of parameters."""

import pytest
import torch
from agvm_harness import Case, build, close
from torch import nn

from engine.zero.recording import KernelCounter


class Layers(nn.Module):
    """65,536 weights in `count` matrices."""

    def __init__(self, count):
        super().__init__()
        self.width = int((65536 / count) ** 0.5)
        backbone, *others = (
            nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(n)))
            for n in (count // 2, count // 4, count // 4)
        )
        self.backbone, (self.neck, self.head) = backbone, others

    def forward(self, x):
        return self.head(self.neck(torch.tanh(self.backbone(x)))).square().mean()


def count_kernels(stage, rule, layers):
    """Kernels of a window (beside DeepSpeed's and the update) and of a whole step of the optimizer outside windows."""
    torch.manual_seed(1)
    model = Layers(layers)
    engine, optimizer = build(Case(stage, 2, rule=rule, bucket_size=1 << 22, agvm={"tau": 2}), model)
    attachment = optimizer._attachment
    window, step = KernelCounter(), KernelCounter()

    def counted(function, counter):
        def call(*args, **kwargs):
            with counter:
                return function(*args, **kwargs)

        return call

    attachment._measure = counted(attachment._measure, window)
    attachment.capture.after_reduction = counted(attachment.capture.after_reduction, window)
    optimizer.step = counted(optimizer.step, step)
    if hasattr(optimizer, "layer_terms"):
        optimizer._norms._measure = counted(optimizer._norms._measure, step)
    counts = []
    for _ in range(1, 5):  # step 2 checks itself; 4 is a usual window
        before = window.count, step.count
        for _ in range(2):
            engine.backward(engine(torch.randn(3, model.width)))
            engine.step()
        counts.append((window.count - before[0], step.count - before[1]))
    close(engine, optimizer)
    return counts[3][0], counts[2][1]


def count_all(cases):
    return [count_kernels(*case) for case in cases]


def test_kernels_of_a_window_and_of_a_step_do_not_grow_with_the_number_of_parameters(ranks):
    cases = [(stage, rule, layers) for stage in (2, 3) for rule in ("adamw", "agvm_lamb") for layers in (16, 64)]
    answers = dict(zip(cases, ranks.run(count_all, 1, cases)[0]))
    for stage, rule, _ in cases[::2]:
        (window, step), (more_window, more_step) = answers[stage, rule, 16], answers[stage, rule, 64]
        assert 0 < more_window <= window + 12, (stage, rule, window, more_window)
        assert 0 < more_step <= step + 12, (stage, rule, step, more_step)


def reads(case, spy):
    """In which order offloaded gradients are waited for and read, in one optimizer step with `spy` on the layout."""
    from engine.optim.sam import SharpnessAware
    from engine.zero.layout import layout_of

    torch.manual_seed(1)
    engine, optimizer = build(case, Layers(16))
    layout = layout_of(engine)
    sam = SharpnessAware(engine, optimizer, layout, 0.05) if spy == "sam" else None
    watched = layout if sam is not None else (optimizer._attachment if spy == "window" else optimizer._norms).layout
    events = []
    wait, gradient = engine.optimizer._wait_for_offload_copies, watched.gradient
    engine.optimizer._wait_for_offload_copies = lambda: (events.append("wait"), wait())[1]
    watched.gradient = lambda fragment: (events.append("read"), gradient(fragment))[1]
    for k in range(2):
        engine.backward(engine(torch.randn(3, 64)))
        events.append("backward")
        if sam is None:
            engine.step()
        elif k == 1:
            sam._climb()
    close(engine, optimizer)
    return events


def all_reads(cases):
    return [reads(*case) for case in cases]


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_gradients_are_waited_for_before_they_are_read(ranks, stage):
    """DeepSpeed copies them to the host without blocking, and waits only in its own step."""
    zero = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        (Case(stage, 2, zero=zero, agvm={"tau": 1}), "window"),
        (Case(stage, 2, rule="lamb", zero=zero, clip_grad=0.1), "norms"),
        (Case(stage, 2, rule="sgd", zero=zero, agvm={"tau": 100}), "sam"),
    ]
    for (_, spy), events in zip(cases, ranks.run(all_reads, 1, cases)[0]):
        own = events[len(events) - events[::-1].index("backward") :]
        assert "read" in own and "wait" in own[: own.index("read")], (spy, own[:5])
