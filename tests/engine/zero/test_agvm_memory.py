"""A window's extra memory: at most one partition and two buckets per rank, over DeepSpeed's own peak.

Measured are the bytes of all tensor storages alive, at every operator of a whole optimizer step (forward, backward
with DeepSpeed's reductions, step): the peak of a step with a window minus the peak of one without.
"""

import weakref

import torch
import torch.distributed as dist
from agvm_harness import Case, build, close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from engine.zero.complete_gradients import CompleteGradients


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes in storages made while it is on."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in [] if function.is_view else tree_leaves(result):  # a view may be of older storage
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.known:
                    self.known[storage] = True
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, size):
        self.live -= size


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Linear(301, 301) for _ in range(6)))
        self.neck = nn.Sequential(nn.Linear(301, 301), nn.Linear(301, 301))
        self.head = nn.Linear(301, 301)

    def forward(self, x):
        return self.head(self.neck(torch.tanh(self.backbone(x)))).square().mean()


def measure(stage, rule, estimator, bucket_size, accumulation):
    torch.manual_seed(1)
    case = Case(
        stage,
        accumulation,
        rule=rule,
        estimator=estimator,
        bucket_size=bucket_size,
        agvm={"tau": 2},
        zero={"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "stage3_prefetch_bucket_size": 1000},
    )
    engine, optimizer = build(case, Wide())
    peaks = []
    for _ in range(4):
        with LiveBytes() as meter:
            for _ in range(accumulation):
                engine.backward(engine(torch.randn(4, 301)))
                engine.step()
        peaks.append(meter.peak)
    assert optimizer.modulator.windows == 2
    model = sum(301 * 302 for _ in range(9))
    partition = optimizer._attachment.capture.plan.numel
    close(engine, optimizer)
    # Step 3 is without a window, step 4 with one; step 2 held the self-check's copy as well.
    return peaks[3] - peaks[2], partition, model, peaks


def measure_all(cases):
    return [measure(*case) for case in cases]


def test_a_window_takes_one_partition_and_two_buckets_at_most(ranks):
    cases = [
        (stage, rule, estimator, bucket, K)
        for stage in (2, 3)
        for rule, estimator, bucket, K in (
            ("adamw", "halves", 30_000, 2),
            ("adamw", "replicas", 100_000, 2),
            ("sgd", "halves", 30_000, 1),
        )
    ]
    cases += [(2, "sgd", "replicas", 30_000, 2)]
    for (stage, rule, estimator, bucket, K), answers in zip(cases, zip(*ranks.run(measure_all, 2, cases))):
        for extra, partition, model, peaks in answers:
            assert partition <= model / 2 + 1000
            bound = 0 if (rule, estimator) == ("sgd", "replicas") else 4 * (partition + 2 * bucket)
            slack = 192 * 1024  # fp64 slices of the sums, whatever the model's size
            if not bound:
                slack += 4 * 301 * 301  # ZeRO-2 keeps transposed gradients: one at a time is copied flat
            assert extra <= bound + slack, (stage, rule, estimator, extra, bound, peaks)
            if bound and K == 2:  # with K = 1 DeepSpeed's own peak is elsewhere, and higher
                assert extra >= 4 * partition * 0.25, "the meter does not see the partition"


class Skipping(Wide):
    """`head` can be left out; gradients that are missing for the first time are all computed, then delivered."""

    def __init__(self):
        super().__init__()
        self.gradients = CompleteGradients(self)

    def forward(self, x, *, head):
        touched = self.gradients.touch()
        z = self.neck(torch.tanh(self.backbone(x)))
        loss = self.head(z).square().mean() if head else z.square().mean()
        return self.gradients.complete(loss, touched).loss


def delivered_peak(stage, tau):
    """The peak of step 4, where rank 0 leaves the head out for the first time, with or without a window."""
    torch.manual_seed(1)
    case = Case(stage, 1, rule="sgd", bucket_size=30_000, agvm={"tau": tau}, zero={"reduce_bucket_size": 100_000})
    model = Skipping()
    engine, optimizer = build(case, model)
    model.gradients.observer = optimizer.observer
    for step in range(1, 5):
        with LiveBytes() as meter:
            engine.backward(engine(torch.randn(4, 301), head=step < 4 or dist.get_rank() > 0))
            model.gradients.release()
            engine.step()
    assert optimizer.modulator.windows == (2 if tau == 2 else 0)
    partition = optimizer._attachment.capture.plan.numel
    close(engine, optimizer)
    return meter.peak, partition


def delivered_peaks(stages):
    return [(delivered_peak(stage, 2), delivered_peak(stage, 100)) for stage in stages]


def test_a_delivered_set_of_gradients_adds_nothing_to_a_window(ranks):
    for (window, partition), (plain, _) in ranks.run(delivered_peaks, 2, (0, 2))[0]:
        assert window - plain <= 4 * (partition + 2 * 30_000) + 192 * 1024
