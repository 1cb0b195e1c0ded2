"""Batch norm with fp32 statistics: torch's own on one rank, and over ranks that of the joined batch."""

import copy

import pytest
import torch
from torch import nn

from models.batch_norm import Fp32BatchNorm, convert_batch_norm, has_sync_bn, has_sync_kernels

CHANNELS = 5


def batch(sizes, seed=0):
    """Maps with means far from zero: E[x^2] - E[x]^2 would lose them."""
    generator = torch.Generator().manual_seed(seed)
    scale, shift = (
        torch.randn(CHANNELS, 1, 1, generator=generator),
        100 * torch.randn(CHANNELS, 1, 1, generator=generator),
    )
    return torch.randn(sum(sizes), CHANNELS, 3, 4, generator=generator) * scale + shift


def gradient(sizes, seed=0):
    return torch.randn(sum(sizes), CHANNELS, 3, 4, generator=torch.Generator().manual_seed(seed + 50))


def norm(**options):
    torch.manual_seed(1)
    layer = nn.BatchNorm2d(CHANNELS, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def converted(layer, *, synchronise=False):
    layer = copy.deepcopy(layer)
    assert convert_batch_norm(layer, synchronise=synchronise) == 1
    return layer


def run(layer, x, dy):
    """Output, input gradient, weight gradients and statistics."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().backward()
    results = {"y": y.detach(), "dx": x.grad, **{f"d{n}": p.grad for n, p in layer.named_parameters()}}
    layer.zero_grad()
    return {**results, **{name: value.clone() for name, value in layer.named_buffers()}}


OPTIONS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.01, "eps": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_one_rank_it_is_torchs_batch_norm(options):
    theirs = norm(**options)
    ours = converted(theirs)
    assert type(ours) is Fp32BatchNorm and ours.state_dict().keys() == theirs.state_dict().keys()
    # The mean over all batches is rounded in another order, because its weight stays on the device.
    rounding = 1e-6 if theirs.momentum is None else 0
    for step in range(3):
        x, dy = batch([6], step), gradient([6], step)
        torch.testing.assert_close(run(ours, x, dy), run(theirs, x, dy), rtol=rounding, atol=0)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(run(ours, x, dy), run(theirs, x, dy), rtol=rounding, atol=1e2 * rounding)


def normalise_shares(sizes):
    return [normalise_share(sizes, options) for options in OPTIONS]


def normalise_share(sizes, options):
    """On a rank: its share of the joined batch through a synchronised norm, two steps, then once in evaluation."""
    from engine import distributed

    rank = distributed.rank()
    layer = converted(norm(**options), synchronise=True)
    share = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    results = [run(layer, batch(sizes, step)[share], gradient(sizes, step)[share]) for step in range(2)]
    layer.eval()
    # Ranks see different numbers of images in evaluation: nothing may wait for the others there.
    for _ in range(rank + 1):
        results.append(run(layer, batch(sizes, 9)[share], gradient(sizes, 9)[share]))
    return results[:3]


@pytest.mark.parametrize("sizes", [(4, 4), (1, 6), (3, 1, 2)], ids=str)
def test_over_ranks_it_is_one_batch_norm_of_the_joined_batch(ranks, sizes):
    answers = ranks.run(normalise_shares, len(sizes), sizes)
    for options, *shares in zip(OPTIONS, *answers):
        whole = norm(**options).double()  # the exact answer
        for step, seed in enumerate((0, 1, 9)):
            whole.train(seed != 9)
            expected = run(whole, batch(sizes, seed).double(), gradient(sizes, seed).double())
            got = [share[step] for share in shares]
            assert all(g.keys() == expected.keys() for g in got)
            if seed == 9 and not whole.track_running_stats:
                continue  # evaluation on the statistics of a rank's own batch, as torch's SyncBatchNorm
            for key in expected:
                if key in ("y", "dx"):  # shares of it, in the order of ranks
                    value = torch.cat([g[key] for g in got])
                elif key in ("dweight", "dbias"):  # DDP and ZeRO add these up
                    value = sum(g[key] for g in got)
                else:  # running statistics, alike on every rank
                    value = got[0][key]
                    assert all(torch.equal(g[key], value) for g in got[1:]), key
                scale = float(expected[key].abs().max()) or 1.0
                torch.testing.assert_close(
                    value.double(),
                    expected[key].double(),
                    rtol=1e-4,
                    atol=1e-4 * scale,
                    msg=lambda text, case=f"{key} {options} step {step}": f"{case}: {text}",
                )


def use_torchs_sync_kernels():
    """Plain versions of the CUDA kernels of torch's SyncBatchNorm, on CPU tensors, and batch norm made to call them."""
    import models.batch_norm

    def per_channel(v):
        return v.view(1, -1, 1, 1)

    def stats(x, eps):
        variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        return mean, torch.rsqrt(variance + eps)

    def gather(x, means, inverse_stds, running_mean, running_var, momentum, eps, counts):
        means, counts = means.double(), counts.double()[:, None]
        total, variances = counts.sum(), inverse_stds.double() ** -2 - eps
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
        running_mean.lerp_(mean.float(), momentum)
        running_var.lerp_((variance * total / (total - 1)).float(), momentum)
        return mean.float(), torch.rsqrt(variance + eps).float()

    def normalise(x, weight, bias, mean, inverse_std, eps):
        z = (x.float() - per_channel(mean)) * per_channel(inverse_std)
        return (z * per_channel(weight) + per_channel(bias)).to(x.dtype)

    def reduce(dy, x, mean, inverse_std, weight, *_):
        dy, around = dy.float(), x.float() - per_channel(mean)
        sum_dy, sum_dy_around = dy.sum((0, 2, 3)), (dy * around).sum((0, 2, 3))
        return sum_dy, sum_dy_around, sum_dy_around * inverse_std, sum_dy

    def input_gradient(dy, x, mean, inverse_std, weight, sum_dy, sum_dy_around, count):
        assert count.dtype == torch.int32
        n = count.sum()
        around = (x.float() - per_channel(mean)) * per_channel(inverse_std**2 * sum_dy_around / n)
        return ((dy.float() - per_channel(sum_dy / n) - around) * per_channel(inverse_std * weight)).to(x.dtype)

    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "stats": stats,
        "gather_stats_with_counts": gather,
        "elemt": normalise,
        "backward_reduce": reduce,
        "backward_elemt": input_gradient,
    }.items():
        library.impl(f"batch_norm_{name}", kernel, "CPU")
    plain, models.batch_norm.has_sync_kernels = models.batch_norm.has_sync_kernels, lambda device: True
    return library, lambda: setattr(models.batch_norm, "has_sync_kernels", plain)


def normalise_as_on_cuda(sizes, dtype):
    """On a rank: its share through our batch norm, plain and on torch's kernels, and through torch's function."""
    import torch.distributed as dist

    from engine import distributed

    rank = distributed.rank()
    share = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    x, dy = batch(sizes)[share].sub(80).to(dtype), gradient(sizes)[share].to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        plain = run(converted(norm(), synchronise=True), x, dy)
    assert {t.dtype for t in kept if t.numel() > CHANNELS} <= {dtype}  # no fp32 copy of a map
    library, undo = use_torchs_sync_kernels()
    try:
        kernels = run(converted(norm(), synchronise=True), x, dy)
        theirs = norm()
        theirs.forward = lambda x: torch.nn.modules._functions.SyncBatchNorm.apply(
            x,
            theirs.weight,
            theirs.bias,
            theirs.running_mean,
            theirs.running_var,
            1e-5,
            0.1,
            dist.group.WORLD,
            len(sizes),
        )
        return plain, kernels, run(theirs, x, dy)
    finally:
        undo()
        library._destroy()


@pytest.mark.parametrize("sizes, dtype", [((2, 3), torch.bfloat16), ((4, 0), torch.float32)], ids=str)
def test_over_ranks_on_torchs_kernels_it_is_torchs_synchronised_batch_norm(ranks, sizes, dtype):
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for plain, kernels, theirs in ranks.run(normalise_as_on_cuda, len(sizes), sizes, dtype):
        theirs.pop("num_batches_tracked")
        for key, expected in theirs.items():
            for mine in (plain, kernels):
                if expected is None:  # torch's has no gradient on a rank without values
                    assert not mine[key].any(), key
                    continue
                assert mine[key].dtype == expected.dtype, key
                torch.testing.assert_close(
                    mine[key], expected, rtol=rounding, atol=rounding, msg=lambda t, key=key: f"{key}: {t}"
                )


@pytest.mark.parametrize("training", [True, False])
def test_on_cuda_half_precision_maps_go_in_as_they_are(training):
    """Fake CUDA tensors: torch has the shape rules of `batch_norm` itself, not of the kernels over ranks."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        sizes: list = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket is torch.ops.aten._to_copy:
                self.sizes.append(result.numel())
            return result

    with FakeTensorMode(), torch.device("cuda"), Casts() as casts:
        layer = Fp32BatchNorm(CHANNELS, dtype=torch.bfloat16).train(training)
        layer.keep_statistics_fp32()
        casts.sizes.clear()
        y = layer(torch.empty(2, CHANNELS, 8, 8, dtype=torch.bfloat16))
    assert y.device.type == "cuda" and y.dtype == torch.bfloat16 and layer.running_mean.dtype == torch.float32
    assert max(casts.sizes) == CHANNELS


def test_over_ranks_the_kernels_are_chosen_by_the_device():
    assert has_sync_kernels(torch.device("cuda", 1)) and not has_sync_kernels(torch.device("cpu"))


def test_statistics_stay_fp32_in_a_half_precision_model():
    layer = nn.Sequential(converted(norm(momentum=0.01)), nn.Conv2d(CHANNELS, 2, 1)).bfloat16()
    exact = norm(momentum=0.01)
    exact.load_state_dict({n: v.to(exact.state_dict()[n].dtype) for n, v in layer[0].state_dict().items()})
    rounding = norm(momentum=0.01).bfloat16()
    assert layer[0].weight.dtype == layer[1].weight.dtype == torch.bfloat16
    for step in range(60):
        x = batch([4], step % 7).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer[0](x)
        expected = exact(x.float())
        rounding(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    for name in ("running_mean", "running_var"):
        mine = getattr(layer[0], name)
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, getattr(exact, name), rtol=1e-6, atol=1e-6)
        lost = (getattr(rounding, name).float() - getattr(exact, name)).abs().max() / getattr(exact, name).abs().max()
        assert lost > 1e-3  # what bf16 statistics would have lost


def test_timms_norm_with_activation_keeps_what_follows_it():
    from timm.layers import BatchNormAct2d

    theirs = BatchNormAct2d(CHANNELS, act_layer=nn.SiLU, inplace=False)
    nn.init.normal_(theirs.weight)
    ours = converted(theirs)
    x, dy = batch([6]), gradient([6])
    for _ in range(2):
        torch.testing.assert_close(run(ours, x, dy), run(theirs, x, dy), rtol=0, atol=0)
        ours.eval(), theirs.eval()


def test_a_timm_model_computes_the_same_after_conversion():
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model("mobilenetv3_small_050", features_only=True)
    ours = copy.deepcopy(theirs)
    count = convert_batch_norm(ours, synchronise=False)
    assert count == sum(isinstance(m, nn.BatchNorm2d) for m in theirs.modules()) > 20
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(2, 3, 64, 64)
    for mine, expected in zip(ours(x), theirs(x)):
        assert torch.equal(mine, expected)


def test_a_batch_norm_of_another_kind_is_refused():
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match="Odd is a batch norm of its own kind"):
        convert_batch_norm(nn.Sequential(Odd(3)), synchronise=True)


class Renamed(nn.SyncBatchNorm):
    """As mmengine's SyncBN: it checks its input in another way, and computes the same."""

    def _check_input_dim(self, x):
        assert x.dim() > 1


def test_a_subclass_that_computes_no_differently_is_converted_and_stays_synchronised():
    from mmcv.cnn import build_norm_layer

    model = nn.Sequential(Renamed(CHANNELS), build_norm_layer(dict(type="SyncBN"), CHANNELS)[1])
    assert has_sync_bn(model) and type(model[1]) is not nn.SyncBatchNorm
    assert convert_batch_norm(model, synchronise=False) == 2
    assert [type(layer) for layer in model] == [Fp32BatchNorm] * 2 and all(layer.synchronise for layer in model)
    model(batch([2]))  # torch's refuses CPU tensors
