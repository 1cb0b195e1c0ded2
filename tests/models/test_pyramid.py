"""The pyramid of HTC-X: its parts against their equations in plain operations, and the whole at odd sizes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.mmdet_setup import import_mmdet

import_mmdet()

from mmdet.registry import MODELS  # noqa: E402

from models.batch_norm import Fp32BatchNorm, convert_batch_norm  # noqa: E402
from models.htcx.cross_scale_shift import AttentionPool, CrossScaleShift  # noqa: E402
from models.htcx.deformable import DeformableBlock, DeformableConv  # noqa: E402
from models.htcx.pyramid import HTCXPyramid  # noqa: E402
from models.htcx.revfp import RevFP  # noqa: E402
from models.htcx.sepc import SEPC, PyramidConv  # noqa: E402

C = 16
SHORT_SIDE_400 = [(50, 87), (25, 44), (13, 22)]  # of a 400 x 696 image


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def maps(sizes, channels=C, batch=2, dtype=torch.float64):
    channels = [channels] * len(sizes) if isinstance(channels, int) else channels
    return [torch.randn(batch, c, *size, dtype=dtype) for c, size in zip(channels, sizes)]


def randomised(module):
    """Every parameter away from its starting value, so that no term of an equation is hidden by a zero or a one."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.1 if "offset" in name else 0.3)
    return module.double()


def close(got, want, tolerance=1e-9):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def bilinear(x, like, align_corners=False):
    return F.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=align_corners)


def normalised(x, axes=(0, 2, 3)):
    mean, var = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt()


# ------------------------------------------------------------------------------------------------- deformable conv


@pytest.mark.parametrize("size", [(7, 10), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_with_zero_offsets_a_deformable_conv_is_a_conv(stride, groups, size):
    layer = DeformableConv(C, 6, stride=stride, offset_groups=groups).double()
    [x] = maps([size])
    x.requires_grad_()
    want = F.conv2d(x, layer.weight, stride=stride, padding=1)
    close(layer(x), want)
    assert layer(x).shape[2:] == ((size[0] + stride - 1) // stride, (size[1] + stride - 1) // stride)
    close(
        torch.autograd.grad(layer(x).square().sum(), [x, layer.weight]),
        torch.autograd.grad(want.square().sum(), [x, layer.weight]),
    )
    close(layer(x, deform=False), want)


def test_offsets_move_the_taps_of_their_group():
    """One pixel down for the first half of the channels, one to the right for the second."""
    layer = DeformableConv(C, 6, offset_groups=2).double()
    assert layer.offset.out_channels == 2 * 2 * 9
    with torch.no_grad():
        down_then_right = layer.offset.bias.view(2, 9, 2)  # y before x
        down_then_right[0, :, 0] = 1
        down_then_right[1, :, 1] = 1
    [x] = maps([(8, 9)])
    moved = torch.cat([F.pad(x[:, : C // 2, 1:], (0, 0, 0, 1)), F.pad(x[:, C // 2 :, :, 1:], (0, 1))], 1)
    inner = (..., slice(1, -1), slice(1, -1))
    close(layer(x)[inner], F.conv2d(moved, layer.weight, padding=1)[inner])
    close(layer(x, deform=False), F.conv2d(x, layer.weight, padding=1))


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
def test_a_deformable_conv_runs_in_bf16(autocast):
    layer = randomised(DeformableConv(C, 6, offset_groups=2)).float()
    [x] = maps([(7, 9)], dtype=torch.float32)
    want = layer(x)
    half = layer if autocast else copy.deepcopy(layer).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = half(x.bfloat16())
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert (y.float() - want).abs().max() < 0.05 * want.abs().max()
    assert half.offset.weight.grad.abs().sum() > 0 and half.weight.grad.dtype == half.weight.dtype


def test_an_offset_that_is_not_a_number_shows_where_it_is():
    layer = DeformableConv(C, 6).double()
    [x] = maps([(8, 9)])
    want = layer(x)
    at = torch.zeros(2, 1, 8, 9, dtype=torch.bool)
    at[0, :, 2, 3] = at[1, :, 7, 0] = True
    layer.offset.register_forward_hook(
        lambda module, args, offset: offset.where(~(at & (torch.arange(18) == 4).view(-1, 1, 1)), torch.nan)
    )
    y = layer(x)
    assert torch.equal(y.isnan(), at.expand_as(y))
    close(y[~y.isnan()], want[~y.isnan()])
    y[~y.isnan()].sum().backward()


def test_one_pixel_of_one_image_is_normalised_by_running_statistics():
    block = DeformableBlock(C).double()
    nn.init.uniform_(block.norm.running_var, 1, 2)
    [x] = maps([(1, 1)], batch=1)
    statistics = block.norm.running_var.clone()
    close(block(x), block.conv(x.relu()) / (statistics + 1e-5).sqrt().view(1, -1, 1, 1))
    assert block.norm.training and torch.equal(block.norm.running_var, statistics)
    block(torch.cat([x, 2 * x]))
    assert not torch.equal(block.norm.running_var, statistics)


# ------------------------------------------------------------------------------------------------------------ SEPC


def sepc_by_hand(conv, xs, norm):
    """The equation with plain convolutions, hence for zero offsets."""
    w0, w1, w2 = (m.weight for m in (conv.from_coarser, conv.same, conv.from_finer))
    ys = [F.conv2d(x, w1, padding=1) for x in xs]
    for level in range(1, len(xs)):
        ys[level] = ys[level] + F.conv2d(xs[level - 1], w2, padding=1, stride=2)
    for level in range(len(xs) - 1):
        ys[level] = ys[level] + bilinear(F.conv2d(xs[level + 1], w0, padding=1), xs[level], align_corners=True)
    return [y.relu() for y in norm(ys)]


def eval_identity(ys):
    return [y / (1 + 1e-5) ** 0.5 for y in ys]


def joint(ys):
    """Mean and variance of the pixels of all levels and images, per channel."""
    pixels = torch.cat([y.transpose(0, 1).flatten(1) for y in ys], 1)
    mean, var = pixels.mean(1), pixels.var(1, unbiased=False)
    return [(y - mean.view(-1, 1, 1)) / (var + 1e-5).sqrt().view(-1, 1, 1) for y in ys]


def test_sepc_at_one_level_is_a_row_of_plain_convs():
    sepc = SEPC(C, depth=3).double().eval()
    [x] = maps([(9, 6)])
    want = x
    for conv in sepc.convs:
        want = (F.conv2d(want, conv.same.weight, padding=1) / (1 + 1e-5) ** 0.5).relu()
    assert len(sepc.convs) == 3 and want.abs().max() > 1e-3
    [got] = sepc([x])
    close(got, want)


@pytest.mark.parametrize("training", [True, False], ids=["batch", "running"])
@pytest.mark.parametrize(
    "sizes",
    [
        [(8, 12), (4, 6), (2, 3)],
        [(13, 22), (7, 11), (4, 6), (2, 3), (1, 2)],
        [(5, 3), (3, 2), (2, 1), (1, 1)],
        [(5, 4)],
    ],
    ids=str,
)
def test_a_pyramid_conv_is_its_equation_with_one_norm_for_all_levels(sizes, training):
    conv = PyramidConv(C).double().train(training)
    xs = maps(sizes)
    close(conv(xs), sepc_by_hand(conv, xs, joint if training else eval_identity))


def test_integrated_statistics_are_those_of_all_levels_together():
    """Levels of different mean: the norm leaves them apart, and remembers the mean over all pixels."""
    conv = PyramidConv(C).double()
    seen = []
    conv.norm.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    xs = [x * (level + 1) for level, x in enumerate(maps([(8, 6), (4, 3), (2, 2)]))]
    conv.norm.momentum = 1.0
    conv(xs)
    raw = sum(x.shape[2] * x.shape[3] for x in xs)
    assert len(seen) == 1 and seen[0].numel() == 2 * C * raw
    plain = sepc_by_hand(conv, xs, lambda ys: seen.append(ys) or ys) and seen[1]
    pixels = torch.cat([y.transpose(0, 1).flatten(1) for y in plain], 1)
    close(conv.norm.running_mean, pixels.mean(1))
    close(conv.norm.running_var, pixels.var(1))
    assert (plain[2].mean((0, 2, 3)) - pixels.mean(1)).abs().max() > 0.1  # or the test could not tell


def test_only_levels_above_the_finest_are_deformed():
    conv = PyramidConv(C).double().eval()
    xs = maps([(8, 6), (4, 3), (2, 2)])
    before = conv(xs)
    for offset in (conv.from_coarser.offset, conv.same.offset, conv.from_finer.offset):
        start = copy.deepcopy(offset.state_dict())
        nn.init.constant_(offset.bias, 0.3)
        after = conv(xs)
        close(after[0], before[0])
        changed = [not torch.allclose(a, b) for a, b in zip(after, before)]
        assert changed == [False, True, offset is not conv.from_coarser.offset]  # the coarsest has none above
        offset.load_state_dict(start)


def test_sepc_fits_levels_that_are_not_half_the_last():
    outs = SEPC(C, depth=2).double()(maps([(9, 9), (4, 4), (3, 1)]))
    assert [tuple(o.shape[2:]) for o in outs] == [(9, 9), (4, 4), (3, 1)]


# ----------------------------------------------------------------------------------------------------------- RevFP


def fuse_by_hand(fusion, a, b, attention=None):
    gap = torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1)
    w = torch.sigmoid(gap @ fusion.weigh.weight.flatten(1).T + fusion.weigh.bias)[:, :, None, None]
    mixed = (w * a + (1 - w) * (b if attention is None else attention * b)).relu()
    y = normalised(fusion.out.conv(mixed))
    return y * fusion.out.norm.weight.view(-1, 1, 1) + fusion.out.norm.bias.view(-1, 1, 1)


def attention_by_hand(fusion, c, u):
    logits = fusion.temperature / C**0.5 * F.conv2d(torch.cat([c, u], 1), fusion.attend.weight, padding=1)
    exp = logits.exp()
    return exp / exp.mean((2, 3), keepdim=True)


def revfp_by_hand(revfp, c3, c4, c5):
    lower, upper = revfp.with_coarser, revfp.with_finer
    u3, u4 = bilinear(c4, c3), bilinear(c5, c4)
    p3 = fuse_by_hand(lower[0], c3, u3, attention_by_hand(lower[0], c3, u3))
    p4 = fuse_by_hand(lower[1], c4, u4, attention_by_hand(lower[1], c4, u4))
    p4 = fuse_by_hand(upper[0], p4, F.max_pool2d(p3, 2, ceil_mode=True))
    return [p3, p4, fuse_by_hand(upper[1], c5, F.max_pool2d(p4, 2, ceil_mode=True))]


@pytest.mark.parametrize(
    "sizes", [[(8, 12), (4, 6), (2, 3)], [(13, 22), (7, 11), (4, 6)], [(3, 5), (2, 3), (1, 2)]], ids=str
)
def test_revfp_is_its_equations(sizes):
    revfp = randomised(RevFP(C))
    xs = maps(sizes)
    close(revfp(xs), revfp_by_hand(revfp, *xs))
    attention = attention_by_hand(revfp.with_coarser[0], xs[0], bilinear(xs[1], xs[0]))
    assert attention.var() > 1e-2 and attention.shape[1] == 1  # or the test could not tell


def test_revfp_starts_with_even_weights_and_no_attention():
    revfp = RevFP(C).double()
    xs = c3, c4, c5 = maps([(13, 22), (7, 11), (4, 6)])
    lower, upper = revfp.with_coarser, revfp.with_finer

    def block(fusion, a, b):
        return normalised(F.conv2d(((a + b) / 2).relu(), fusion.out.conv.weight, padding=1))

    p3 = block(lower[0], c3, bilinear(c4, c3))
    p4 = block(upper[0], block(lower[1], c4, bilinear(c5, c4)), F.max_pool2d(p3, 2, ceil_mode=True))
    close(revfp(xs), [p3, p4, block(upper[1], c5, F.max_pool2d(p4, 2, ceil_mode=True))])
    assert all(f.out.conv.offset.out_channels == 36 for f in [*lower, *upper])  # 2 groups of 9 taps
    assert all(f.temperature.shape == (1,) for f in lower) and all(f.temperature is None for f in upper)


def test_revfp_fits_levels_that_are_not_half_the_last():
    outs = RevFP(C).double()(maps([(9, 9), (4, 4), (2, 2)]))
    assert [tuple(o.shape[2:]) for o in outs] == [(9, 9), (4, 4), (2, 2)]


def test_revfp_needs_two_levels():
    with pytest.raises(ValueError, match="2 levels or more, got 1"):
        RevFP(C, 1)


# ------------------------------------------------------------------------------------------------------------- CSN


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_the_shift_takes_its_groups_from_the_right_levels(levels):
    channels = 32
    number = 100 * torch.arange(levels).view(1, levels, 1, 1, 1) + torch.arange(channels).view(1, 1, channels, 1, 1)
    shifted = CrossScaleShift.shift(number.expand(2, -1, -1, 2, 3))
    assert shifted.shape == (2, levels, 40, 2, 3)
    for level in range(levels):
        sources = [(level + step) % levels for step in (1, 1, -1, -1, 2, 2, -2, -2)] + [level] * channels
        want = [100 * source + channel for source, channel in zip(sources, [*range(8), *range(channels)])]
        assert shifted[0, level, :, 0, 0].tolist() == want
    assert (shifted == shifted[:1, :, :, :1, :1]).all()


def context_by_hand(pool, x):
    """x: (N, C, S)."""
    share = torch.softmax(torch.einsum("ncs,c->ns", x, pool.logits.weight.flatten()), 1)
    return torch.einsum("ncs,ns->nc", x, share) @ pool.project.weight.squeeze(2).T + pool.project.bias


def csn_by_hand(csn, xs, middle):
    size, levels = xs[middle].shape[2:], len(xs)
    common = [F.adaptive_max_pool2d(x, size) if i <= middle else bilinear(x, xs[middle]) for i, x in enumerate(xs)]
    ys = []
    for i, mix in enumerate(csn.mix):
        moved = [common[(i + step) % levels][:, g : g + 1] for g, step in enumerate((1, -1, 2, -2))]
        hidden = F.conv2d(torch.cat([*moved, common[i]], 1), mix[0].weight)
        hidden = normalised(hidden) * mix[1].weight.view(-1, 1, 1) + mix[1].bias.view(-1, 1, 1)
        ys.append(common[i] + F.conv2d(hidden.relu(), mix[3].weight, mix[3].bias))
    context = context_by_hand(csn.spatial_context, (sum(ys) / levels).flatten(2))
    context = context + context_by_hand(csn.scale_context, torch.stack([y.mean((2, 3)) for y in ys], 2))
    ys = [y + context[:, :, None, None] for y in ys]
    return [
        x + (bilinear(y, x) if i < middle else F.adaptive_max_pool2d(y, x.shape[2:]))
        for i, (x, y) in enumerate(zip(xs, ys))
    ]


@pytest.mark.parametrize(
    "sizes",
    [
        [(8, 12), (4, 6), (2, 3)],
        [(13, 22), (7, 11), (4, 6)],
        [(5, 4)],
        [(7, 3), (4, 2)],
        [(17, 9), (9, 5), (5, 3), (3, 2), (2, 1)],
    ],
    ids=str,
)
def test_csn_is_its_equations(sizes):
    csn = randomised(CrossScaleShift(C, len(sizes)))
    xs = maps(sizes)
    close(csn(xs), csn_by_hand(csn, xs, len(sizes) // 2))


def test_levels_may_meet_at_another_size():
    csn = randomised(CrossScaleShift(C, 4, meeting_level=1))
    xs = maps([(9, 8), (5, 4), (3, 2), (2, 1)])
    close(csn(xs), csn_by_hand(csn, xs, 1))


def test_a_context_attends():
    pool = AttentionPool(C).double()
    nn.init.ones_(pool.logits.weight)
    nn.init.eye_(pool.project.weight.data.squeeze(2))
    nn.init.zeros_(pool.project.bias)
    x = torch.zeros(1, C, 5, dtype=torch.float64)
    x[:, :, 3] = 10
    close(pool(x), x[:, :, 3])  # not the mean, 2


def test_csn_refuses_what_it_cannot_shift():
    with pytest.raises(ValueError, match="divide by 16, got 24"):
        CrossScaleShift(24)
    with pytest.raises(ValueError, match="one of the 3 levels, counted from 0, got 3"):
        CrossScaleShift(C, 3, meeting_level=3)


# --------------------------------------------------------------------------------------------------- whole pyramid


WIDTHS = [16, 24, 40]


def pyramid(**options):
    neck = MODELS.build(
        dict(type="HTCXPyramid", **{"in_channels": WIDTHS, "out_channels": C, "sepc_depth": 2, **options})
    )
    neck.init_weights()
    return neck


def test_the_pyramid_of_the_paper():
    with torch.device("meta"):
        neck = HTCXPyramid()
    assert len(neck.sepc.convs) == 4 and len(neck.extra) == 3 and len(neck.laterals) == 3
    c, norm, taps = 384, 2 * 384, 9 * 384  # taps: weights of a 3x3 for one output channel
    deform = taps * (c + 18) + 18  # the offsets have a bias
    laterals = c * (384 + 576 + 1152) + 3 * norm
    revfp = 4 * (2 * c + 1 + deform + taps * 18 + 18 + norm) + 2 * (2 * taps + 1)  # a second group of offsets
    shift = 3 * (c * (c + c // 4) + norm + c * c + c) + 2 * (c + c * c + c)
    extra, sepc = 3 * (deform + norm), 4 * (3 * deform + norm)
    assert sum(p.numel() for p in neck.parameters()) == laterals + revfp + shift + extra + sepc == 28_780_068


@pytest.mark.parametrize("image", [(400, 696), (401, 333), (256, 256), (64, 1600), (33, 65)], ids=str)
@pytest.mark.parametrize("num_outs, channels", [(6, 16), (5, 32), (3, 16)])
def test_sizes_halve_rounding_up_at_any_image_size(image, num_outs, channels):
    sizes = [tuple(-(-side // 2 ** (level + 3)) for side in image) for level in range(num_outs)]
    outs = pyramid(num_outs=num_outs, out_channels=channels, sepc_depth=1)(maps(sizes[:3], WIDTHS, dtype=torch.float32))
    assert isinstance(outs, tuple) and [tuple(o.shape) for o in outs] == [(2, channels, *size) for size in sizes]
    assert all(o.isfinite().all() for o in outs)
    if image == (400, 696) and num_outs == 6:
        assert sizes[:3] == SHORT_SIDE_400 and sizes[-1] == (2, 3)


def test_one_small_image_trains():
    neck = pyramid()
    outs = neck(maps([(16, 16), (8, 8), (4, 4)], WIDTHS, batch=1, dtype=torch.float32))
    assert [o.shape[2] for o in outs] == [16, 8, 4, 2, 1, 1]
    sum(o.sum() for o in outs).backward()
    assert all(p.grad.isfinite().all() for p in neck.parameters())


def test_the_order_of_the_parts():
    """Laterals, RevFP, CSN, further levels with a ReLU before all but the first, SEPC."""
    neck = randomised(pyramid())
    xs = maps(SHORT_SIDE_400[1:] + [(7, 11)], WIDTHS)
    want = neck.shift(neck.revfp([lateral(x) for lateral, x in zip(neck.laterals, xs)]))
    for i, block in enumerate(neck.extra):
        want.append(block.norm(block.conv(want[-1].relu() if i else want[-1])))
    close(list(neck(xs)), neck.sepc(want))


def test_further_levels_first():
    neck = randomised(pyramid(extra_levels_first=True))
    xs = maps([(16, 24), (8, 12), (4, 6)], WIDTHS)
    want = [lateral(x) for lateral, x in zip(neck.laterals, xs)]
    for block in neck.extra:
        want.append(block(want[-1]))
    assert len(neck.shift.mix) == 6 and neck.shift.meeting_level == 1
    close(list(neck(xs)), neck.sepc(neck.shift(neck.revfp(want))))


def test_parts_can_be_left_out():
    neck = randomised(pyramid(revfp=False, shift=False, sepc_depth=0, num_outs=3))
    xs = maps([(16, 24), (8, 12), (4, 6)], WIDTHS)
    close(list(neck(xs)), [lateral(x) for lateral, x in zip(neck.laterals, xs)])
    names = {name.split(".")[0] for name, _ in neck.named_parameters()}
    assert names == {"laterals"}
    assert {name.split(".")[0] for name, _ in pyramid(revfp=False, sepc_depth=0).named_parameters()} == {
        "laterals",
        "shift",
        "extra",
    }


def test_wrong_numbers_of_maps_are_refused():
    with pytest.raises(ValueError, match="num_outs must be at least 3, one for each input, got 2"):
        HTCXPyramid(WIDTHS, C, 2)
    with pytest.raises(ValueError, match="takes 3 maps, got 2"):
        pyramid()(maps([(8, 8), (4, 4)], WIDTHS[:2], dtype=torch.float32))


def gradients(neck, xs):
    neck.zero_grad()
    outs = neck(xs)
    generator = torch.Generator().manual_seed(3)
    sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outs).backward()
    return {name: p.grad.abs().max().item() for name, p in neck.named_parameters()}


def test_gradients_reach_every_parameter():
    """At step one all but the temperatures, each of which is a factor of a convolution that starts at zero."""
    neck = pyramid().double()
    xs = maps([(25, 44), (13, 22), (7, 11)], WIDTHS)
    grads = gradients(neck, xs)
    without = {name for name, size in grads.items() if size < 1e-9}
    assert without == {f"revfp.with_coarser.{level}.temperature" for level in (0, 1)}
    torch.optim.SGD(neck.parameters(), lr=1e-3).step()
    grads = gradients(neck, xs)
    assert min(grads.values()) > 1e-9, min(grads, key=grads.get)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
@pytest.mark.parametrize("converted", [True, False], ids=["fp32-norm", "torch-norm"])
def test_bf16_is_close_to_fp32(autocast, converted):
    neck = pyramid()
    xs = maps(SHORT_SIDE_400, WIDTHS, dtype=torch.float32)
    want = neck(xs)
    half = copy.deepcopy(neck)
    if converted:
        convert_batch_norm(half, synchronise=False)
    if not autocast:
        half, xs = half.bfloat16(), [x.bfloat16() for x in xs]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outs = half(xs)
    for level, (got, expected) in enumerate(zip(outs, want)):
        assert got.dtype == torch.bfloat16
        assert (got.float() - expected).norm() < 0.05 * expected.norm(), level
    sum(o.float().sum() for o in outs).backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())


def test_every_norm_can_be_converted():
    neck = pyramid()
    xs = maps([(25, 44), (13, 22), (7, 11)], WIDTHS, dtype=torch.float32)
    ours = copy.deepcopy(neck)
    #           laterals, RevFP, CSN, further levels, SEPC
    assert convert_batch_norm(ours, synchronise=False) == 3 + 4 + 3 + 3 + 2
    assert isinstance(ours.sepc.convs[0].norm, Fp32BatchNorm)
    close(ours(xs), neck(xs), 1e-5)


def test_norm_eval_keeps_the_statistics_and_trains_the_rest():
    xs = maps([(25, 44), (13, 22), (7, 11)], WIDTHS, dtype=torch.float32)
    for norm_eval in (True, False):
        neck = pyramid(norm_eval=norm_eval).train()
        start = {name: value.clone() for name, value in neck.named_buffers() if "running" in name}
        sum(o.sum() for o in neck(xs)).backward()
        assert len(start) == 2 * 15
        assert {torch.equal(dict(neck.named_buffers())[name], value) for name, value in start.items()} == {norm_eval}
        assert neck.sepc.convs[0].norm.weight.grad.abs().sum() > 0 and neck.training


def test_init_weights_sets_every_parameter():
    """As under zero.Init, where what constructors wrote is lost."""
    neck = HTCXPyramid(WIDTHS, C)
    for parameter in neck.parameters():
        nn.init.constant_(parameter, torch.nan)
    neck.init_weights()
    for name, value in neck.named_parameters():
        if ".offset." in name or "attend" in name or "weigh." in name or name.endswith("bias"):
            assert (value == 0).all(), name
        elif value.dim() == 1:  # weights of norms, temperatures
            assert (value == 1).all(), name
        else:
            fan_in = value[0].numel()
            assert abs(value.mean()) < 5 * (fan_in * value.numel()) ** -0.5, name
            assert abs(value.std() * fan_in**0.5 - 1) < 4 * (2 * value.numel()) ** -0.5, name
