"""mmcv's ops on our kernels give what the formulas give: values, gradients, half precision, empty inputs."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models import mmcv_kernels

mmcv_kernels.install()  # before the first import of mmcv.ops
import mmcv.ops  # noqa: E402

ROOT = Path(mmcv_kernels.__file__).parents[2]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rand(*shape, grad=False, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def close(got, want, tolerance=1e-6):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------- boxes


def random_boxes(count, size=20.0, dtype=torch.float32):
    corner = torch.rand(count, 2) * size
    return torch.cat([corner, corner + torch.rand(count, 2) * size], 1).to(dtype)


def plain_iou(a, b, offset=0):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    area = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    union = sum(area) - width * height
    return width * height / union if union else 0.0


def plain_nms(boxes, scores, threshold, offset=0):
    keep = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if all(plain_iou(boxes[i], boxes[k], offset) <= threshold for k in keep):
            keep.append(i)
    return keep


@pytest.mark.parametrize("offset", [0, 1])
def test_nms_keeps_what_plain_python_keeps(offset):
    # Boxes about as small as the offset, so that the two conventions keep different boxes.
    boxes, scores = random_boxes(60, size=4), torch.rand(60)
    kept = {o: plain_nms(boxes.tolist(), scores.tolist(), 0.4, o) for o in (0, 1)}
    assert kept[0] != kept[1]
    dets, keep = mmcv.ops.nms(boxes, scores, 0.4, offset=offset)
    assert keep.tolist() == kept[offset]
    close(dets, torch.cat([boxes, scores[:, None]], 1)[keep])


def test_nms_score_threshold_max_num_and_numpy():
    boxes, scores = random_boxes(50), torch.rand(50)
    high = [i for i in plain_nms(boxes.tolist(), scores.tolist(), 0.5) if scores[i] > 0.3]
    dets, keep = mmcv.ops.nms(boxes.numpy(), scores.numpy(), 0.5, score_threshold=0.3, max_num=5)
    assert isinstance(dets, np.ndarray) and keep.tolist() == high[:5] and len(high) > 5
    assert mmcv.ops.nms(boxes, scores, 0.5, score_threshold=0.3)[1].tolist() == high


def plain_soft_nms(boxes, scores, threshold, sigma, min_score, method, offset):
    left, dets, keep = dict(enumerate(scores)), [], []
    while left:
        best = max(left, key=left.get)
        dets.append([*boxes[best], left.pop(best)])
        keep.append(best)
        for i in list(left):
            iou = plain_iou(boxes[best], boxes[i], offset)
            if method == "gaussian":
                left[i] *= math.exp(-iou * iou / sigma)
            elif iou >= threshold:
                left[i] *= 1 - iou if method == "linear" else 0
            if left[i] < min_score:
                del left[i]
    return dets, keep


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms_decays_as_plain_python_does(method, offset):
    boxes, scores = random_boxes(40, size=6), torch.rand(40)
    want, want_keep = plain_soft_nms(boxes.tolist(), scores.tolist(), 0.3, 0.5, 0.05, method, offset)
    assert len(want_keep) < 40 and (method == "naive" or any(d[4] != scores[k] for d, k in zip(want, want_keep)))
    dets, keep = mmcv.ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, method, offset)
    assert keep.tolist() == want_keep
    close(dets, torch.tensor(want), 1e-5)


def test_soft_nms_of_boxes_without_area_and_all_below_min_score():
    points = torch.tensor([[3.0, 1, 3, 1]]).repeat(4, 1)
    dets, keep = mmcv.ops.soft_nms(points, torch.tensor([0.5, 0.4, 0.3, 0.0]), method="gaussian")
    assert keep.tolist() == [0, 1, 2]
    assert torch.isfinite(dets).all()
    assert mmcv.ops.soft_nms(random_boxes(3), torch.tensor([0.1, 0.2, 0.15]), min_score=0.5)[1].tolist() == [1]


def test_nms_match_groups_what_each_box_suppresses():
    boxes, scores = random_boxes(30), torch.rand(30)
    groups, left = [], sorted(range(30), key=lambda i: -scores[i])
    while left:
        group = [i for i in left if i == left[0] or plain_iou(boxes[left[0]].tolist(), boxes[i].tolist()) >= 0.3]
        groups.append(group)
        left = [i for i in left if i not in group]
    dets = torch.cat([boxes, scores[:, None]], 1)
    assert max(map(len, groups)) > 1
    assert [group.tolist() for group in mmcv.ops.nms_match(dets, 0.3)] == groups
    point = torch.tensor([[1.0, 1, 1, 1, 0.5]])
    assert [group.tolist() for group in mmcv.ops.nms_match(point, 0.3)] == [[0]]


def batched(class_agnostic=False, **cfg):
    torch.manual_seed(1)
    boxes, scores, labels = random_boxes(80), torch.rand(80), torch.randint(3, (80,))
    dets, keep = mmcv.ops.batched_nms(boxes, scores, labels, cfg or None, class_agnostic=class_agnostic)
    return boxes, scores, labels, dets, keep


def nms_by_class(boxes, scores, labels, threshold):
    kept = []
    for label in labels.unique().tolist():
        of_label = (labels == label).nonzero()[:, 0].tolist()
        kept += [of_label[i] for i in plain_nms(boxes[of_label].tolist(), scores[of_label].tolist(), threshold)]
    return sorted(kept, key=lambda i: -scores[i])


@pytest.mark.parametrize("split_thr", [10000, 10])
def test_batched_nms_keeps_classes_apart(split_thr):
    boxes, scores, labels, dets, keep = batched(type="nms", iou_threshold=0.4, split_thr=split_thr)
    want = nms_by_class(boxes, scores, labels, 0.4)
    assert keep.tolist() == want
    close(dets, torch.cat([boxes, scores[:, None]], 1)[want])
    *_, dets, keep = batched(type="nms", iou_threshold=0.4, split_thr=split_thr, max_num=4)
    assert keep.tolist() == want[:4] and dets.shape == (4, 5)


def test_batched_nms_class_agnostic_soft_and_none():
    boxes, scores, labels, _, keep = batched(class_agnostic=True, iou_threshold=0.4)
    assert keep.tolist() == plain_nms(boxes.tolist(), scores.tolist(), 0.4) != nms_by_class(boxes, scores, labels, 0.4)
    *_, dets, keep = batched(class_agnostic=True, type="soft_nms", iou_threshold=0.4, min_score=0.05)
    want, want_keep = plain_soft_nms(boxes.tolist(), scores.tolist(), 0.4, 0.5, 0.05, "linear", 0)
    assert keep.tolist() == want_keep
    close(dets, torch.tensor(want), 1e-5)
    *_, dets, keep = batched()
    assert keep.tolist() == scores.argsort(descending=True).tolist() and dets.shape == (80, 5)


@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_bbox_overlaps(mode):
    a, b = random_boxes(5), random_boxes(5)
    shared = [[plain_iou(p, q, 1) for q in b.tolist()] for p in a.tolist()]
    if mode == "iof":  # iou = i / (p + q - i), so i = iou (p + q) / (1 + iou)
        area = [[(x2 - x1 + 1) * (y2 - y1 + 1) for x1, y1, x2, y2 in boxes.tolist()] for boxes in (a, b)]
        shared = [[iou * (p + q) / (1 + iou) / p for iou, q in zip(r, area[1])] for r, p in zip(shared, area[0])]
    want = torch.tensor(shared)
    close(mmcv.ops.bbox_overlaps(a, b, mode, offset=1), want, 1e-5)
    close(mmcv.ops.bbox_overlaps(a, b, mode, aligned=True, offset=1), want.diagonal(), 1e-5)


def lane(x, start=0.0, length=72, end=None):
    return [0.0, 1.0, start, 0.0, length, *[float(x)] * 36, *[float(x if end is None else end)] * 36]


def test_line_nms_drops_near_lanes_over_the_strips_they_share():
    # The first ends half-way, where the fourth turns away; a lane of no length shares nothing with any.
    lanes = [lane(50, length=36, end=900), lane(10), lane(12), lane(52, start=0.1, end=0), lane(51, length=0), lane(11)]
    scores = torch.tensor([0.9, 0.5, 0.8, 0.6, 0.3, 0.2])
    keep, count, parent = mmcv.ops.line_nms(torch.tensor(lanes), scores, 5.0, 10)
    assert keep[:count].tolist() == [0, 2, 4] and parent.tolist() == [1, 2, 2, 1, 3, 2]
    keep, count, parent = mmcv.ops.line_nms(torch.tensor(lanes), scores, 5.0, 1)
    assert keep[:count].tolist() == [0] and parent.tolist() == [1, 0, 0, 1, 0, 0]


def test_suppression_of_nothing():
    none, scores = torch.zeros(0, 4), torch.zeros(0)
    for op in (mmcv.ops.nms, mmcv.ops.soft_nms):
        dets, keep = op(none, scores, 0.5)
        assert dets.shape == (0, 5) and keep.shape == (0,) and keep.dtype == torch.long
    assert mmcv.ops.nms_match(torch.zeros(0, 5), 0.5) == []
    assert mmcv.ops.line_nms(torch.zeros(0, 77), scores, 5.0, 4)[1] == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_suppression_in_half_precision(dtype):
    boxes, scores = random_boxes(40).to(dtype), torch.linspace(0.01, 0.9, 40).to(dtype).sort().values
    for op, tolerance in ((mmcv.ops.nms, 0), (mmcv.ops.soft_nms, 1e-2)):
        dets, keep = op(boxes, scores, 0.4)
        want, want_keep = op(boxes.float(), scores.float(), 0.4)
        assert dets.dtype == dtype and keep.tolist() == want_keep.tolist()
        close(dets.float(), want, tolerance)


# ---------------------------------------------------------------------------------------------- regions of a map


def bilinear(features, y, x):
    """Channels of one map at a point, by hand: the border within a pixel of the map, zero beyond."""
    height, width = features.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return features[:, 0, 0] * 0
    y, x = (torch.as_tensor(c, dtype=features.dtype).clamp(0, n - 1) for c, n in ((y, height), (x, width)))
    y0, x0 = int(y), int(x)
    y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
    above = features[:, y0, x0] * (1 - x + x0) + features[:, y0, x1] * (x - x0)
    below = features[:, y1, x0] * (1 - x + x0) + features[:, y1, x1] * (x - x0)
    return above * (1 - y + y0) + below * (y - y0)


def pool_by_hand(x, rois, size, scale, ratio, aligned, mode, offset=None, gamma=0.1):
    out = []
    for n, (image, x1, y1, x2, y2) in enumerate(rois.tolist()):
        left, top = x1 * scale - 0.5 * aligned, y1 * scale - 0.5 * aligned
        width, height = (x2 - x1) * scale, (y2 - y1) * scale
        if not aligned:
            width, height = max(width, 1.0), max(height, 1.0)
        grid_y, grid_x = ratio or math.ceil(height / size[0]), ratio or math.ceil(width / size[1])
        for i in range(size[0]):
            for j in range(size[1]):
                dx, dy = (0, 0) if offset is None else offset[n, :, i, j] * gamma * torch.tensor([width, height])
                points = [
                    bilinear(
                        x[int(image)],
                        top + dy + height / size[0] * (i + (k + 0.5) / grid_y),
                        left + dx + width / size[1] * (j + (m + 0.5) / grid_x),
                    )
                    for k in range(grid_y)
                    for m in range(grid_x)
                ]
                out.append(torch.stack(points).amax(0) if mode == "max" else torch.stack(points).mean(0))
    return torch.stack(out).view(len(rois), *size, -1).movedim(3, 1)


# Inside, over the edge, smaller than a pixel, mostly outside; no side divides into whole samples.
ROIS = [[0, 2.1, 1.3, 13.4, 9.2], [1, -7.3, -4.1, 6.3, 15.2], [1, 6.2, 5.1, 6.9, 5.4], [0, 15.1, 10.2, 29.7, 25.3]]
SIZE, SCALE = (2, 3), 0.5


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_is_a_bilinear_pool(aligned, ratio, mode):
    x, rois = rand(2, 3, 7, 9, grad=True), torch.tensor(ROIS, dtype=torch.float64)
    got = mmcv.ops.RoIAlign(SIZE, SCALE, ratio, mode, aligned)(x, rois)
    want = pool_by_hand(x, rois, SIZE, SCALE, ratio, aligned, mode)
    close(got, want)
    grad = rand(*got.shape)
    close(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(want, x, grad)[0])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("chunk", [1 << 24, 1000])
def test_the_gradient_by_products_is_torchvisions(aligned, chunk, monkeypatch):
    from models.mmcv_kernels import roi_align_gradient as products

    monkeypatch.setattr(products, "_CHUNK", chunk)
    corner = torch.rand(200, 2, generator=torch.Generator().manual_seed(1)) * 90 - 15
    rois = torch.cat([torch.arange(200.0)[:, None] % 3, corner, corner.flip(0).abs() + corner], dim=1)
    shape, grad = torch.Size((4, 5, 16, 20)), rand(200, 5, 7, 6).float()  # no region lies in the fourth image
    assert products.is_faster(rois, shape, (7, 6), 2) and not products.is_faster(rois, shape, (7, 6), 0)
    got = products.roi_align_gradient(grad, rois, shape, (7, 6), 0.25, 2, aligned)
    want = torch.ops.torchvision._roi_align_backward(grad, rois, 0.25, 7, 6, *shape, 2, aligned)
    assert (got - want).abs().max() < 3e-6 * want.abs().max() and want.abs().max() > 1


def test_roi_pool_takes_the_largest_of_the_pixels_a_bin_touches():
    x, rois = rand(2, 3, 7, 9, grad=True), torch.tensor(ROIS + [[0, 9.2, 9.2, 8.1, 8.1]], dtype=torch.float64)
    want = torch.zeros(len(rois), 3, *SIZE, dtype=x.dtype)
    for n, (image, x1, y1, x2, y2) in enumerate(rois.tolist()):
        left, top, width, height = x1 * SCALE, y1 * SCALE, (x2 + 1 - x1) * SCALE, (y2 + 1 - y1) * SCALE
        for i in range(SIZE[0]):
            for j in range(SIZE[1]):
                rows = [math.floor(top + i * height / SIZE[0]), math.ceil(top + (i + 1) * height / SIZE[0])]
                cols = [math.floor(left + j * width / SIZE[1]), math.ceil(left + (j + 1) * width / SIZE[1])]
                bin_ = x[int(image), :, max(rows[0], 0) : max(rows[1], 0), max(cols[0], 0) : max(cols[1], 0)]
                if width > 0 and height > 0 and bin_.numel():
                    want[n, :, i, j] = bin_.amax((1, 2))
    got = mmcv.ops.RoIPool(SIZE, SCALE)(x, rois)
    close(got, want)
    assert (got[-1] == 0).all() and (got[3] == 0).any()
    grad = rand(*got.shape)
    close(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(want, x, grad)[0])


@pytest.mark.parametrize("ratio", [0, 2])
def test_deform_roi_pool_moves_its_bins(ratio):
    x, rois = rand(2, 3, 7, 9, grad=True), torch.tensor(ROIS[:3], dtype=torch.float64)
    offset = rand(3, 2, *SIZE, grad=True)
    got = mmcv.ops.deform_roi_pool(x, rois, offset, SIZE, SCALE, ratio, 0.3)
    want = pool_by_hand(x, rois, SIZE, SCALE, ratio, True, "avg", offset, 0.3)
    close(got, want)
    grad = rand(*got.shape)
    for a, b in zip(torch.autograd.grad(got, (x, offset), grad), torch.autograd.grad(want, (x, offset), grad)):
        close(a, b)
    close(
        mmcv.ops.deform_roi_pool(x, rois, None, SIZE, SCALE, ratio),
        mmcv.ops.roi_align(x, rois, SIZE, SCALE, ratio, "avg", True),
    )


def test_deform_roi_pool_packs_run():
    x, rois = rand(1, 4, 8, 8, grad=True, dtype=torch.float32), torch.tensor([[0, 1.0, 1, 6, 7]])
    for pack in (mmcv.ops.DeformRoIPoolPack, mmcv.ops.ModulatedDeformRoIPoolPack):
        out = pack((3, 3), 4, deform_fc_channels=8)(x, rois)
        out.sum().backward()
        assert out.shape == (1, 4, 3, 3) and x.grad.abs().sum() > 0


REGION_OPS = {
    "roi_align avg": lambda x, rois: mmcv.ops.roi_align(x, rois, SIZE, SCALE, 0, "avg", True),
    "roi_align max": lambda x, rois: mmcv.ops.roi_align(x, rois, SIZE, SCALE, 0, "max", True),
    "roi_pool": lambda x, rois: mmcv.ops.roi_pool(x, rois, SIZE, SCALE),
    "deform_roi_pool": lambda x, rois: mmcv.ops.deform_roi_pool(x, rois, None, SIZE, SCALE, 0),
    "deform_roi_pool moved": lambda x, rois: mmcv.ops.deform_roi_pool(
        x, rois, x.new_ones(len(rois), 2, *SIZE), SIZE, SCALE, 0
    ),
}


@pytest.mark.parametrize("op", REGION_OPS.values(), ids=REGION_OPS.keys())
@pytest.mark.parametrize("images", [2, 0])
def test_no_regions_pool_to_nothing_and_a_zero_gradient(op, images):
    x = rand(images, 3, 7, 9, grad=True, dtype=torch.float32)
    out = op(x, torch.zeros(0, 5))
    out.sum().backward()
    assert out.shape == (0, 3, *SIZE)
    close(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("op", REGION_OPS.values(), ids=REGION_OPS.keys())
@pytest.mark.parametrize("dtype", HALVES)
def test_regions_in_half_precision(op, dtype):
    check_half(op, dtype, rand(2, 3, 7, 9), torch.tensor(ROIS))


def check_half(op, dtype, *inputs):
    """`op` in half precision agrees with itself in fp32 on the same numbers, in value and in every gradient."""
    results = []
    for work in (dtype, torch.float32):
        leaves = [i.detach().to(dtype).to(work).requires_grad_() if i.is_floating_point() else i for i in inputs]
        out = op(*leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).to(work))
        results.append((out, [leaf.grad for leaf in leaves if getattr(leaf, "grad", None) is not None]))
    (out, grads), (want, want_grads) = results
    assert out.dtype == dtype and all(grad.dtype == dtype for grad in grads) and grads
    close(out.float(), want, 3e-2)
    assert want.abs().sum() > 0
    for grad, want_grad in zip(grads, want_grads, strict=True):
        close(grad.float() / want_grad.abs().max(), want_grad / want_grad.abs().max(), 3e-2)


# ------------------------------------------------------------------------------------ deformable convolution


def conv_by_sampling(x, offset, mask, weight, stride, padding, dilation, groups, deform_groups):
    """Deformable convolution as bilinear samples (zero outside) and a sum of products."""
    n, channels, height, width = x.shape
    taps_y, taps_x = weight.shape[2:]
    out_h, out_w = offset.shape[2:]
    offset = offset.view(n, deform_groups, taps_y * taps_x, 2, out_h, out_w)
    mask = mask.view(n, deform_groups, taps_y * taps_x, out_h, out_w)
    columns = []
    for tap in range(taps_y * taps_x):
        y = torch.arange(out_h).to(x)[:, None] * stride - padding + tap // taps_x * dilation
        x_ = torch.arange(out_w).to(x)[None, :] * stride - padding + tap % taps_x * dilation
        groups_of_x = []
        for group, part in enumerate(x.chunk(deform_groups, 1)):
            at_y, at_x = y + offset[:, group, tap, 0], x_ + offset[:, group, tap, 1]
            grid = torch.stack([(2 * at_x + 1) / width - 1, (2 * at_y + 1) / height - 1], -1)
            groups_of_x.append(F.grid_sample(part, grid, align_corners=False) * mask[:, group, tap, None])
        columns.append(torch.cat(groups_of_x, 1))
    columns = torch.stack(columns, 2).view(n, groups, channels // groups, taps_y * taps_x, out_h, out_w)
    weight = weight.view(groups, -1, channels // groups, taps_y * taps_x)
    return torch.einsum("ngcthw,goct->ngohw", columns, weight).flatten(1, 2)


CONVS = [(1, 1, 1, 1, 1), (2, 1, 1, 2, 1), (1, 2, 2, 1, 2), (1, 0, 1, 2, 4)]


@pytest.mark.parametrize("stride, padding, dilation, groups, deform_groups", CONVS)
@pytest.mark.parametrize("masked", [False, True])
def test_deform_conv_samples_where_its_offsets_say(stride, padding, dilation, groups, deform_groups, masked):
    x, weight = rand(2, 4, 6, 7, grad=True), rand(6, 4 // groups, 3, 3, grad=True)
    size = F.conv2d(x, weight, None, stride, padding, dilation, groups).shape[2:]
    offset = (rand(2, deform_groups * 18, *size) * 2).requires_grad_()
    mask = rand(2, deform_groups * 9, *size, grad=True) if masked else torch.ones(2, deform_groups * 9, *size)
    bias = rand(6, grad=True)
    layout = (stride, padding, dilation, groups, deform_groups)
    want = conv_by_sampling(x, offset, mask, weight, *layout)
    if masked:
        inputs = (x, offset, mask, weight, bias)
        want = want + bias[:, None, None]
        got = mmcv.ops.modulated_deform_conv2d(*inputs, *layout)
        close(mmcv.ops.modulated_deform_conv2d(x, offset, mask, weight, None, *layout), want - bias[:, None, None])
    else:
        inputs = (x, offset, weight)
        got = mmcv.ops.deform_conv2d(*inputs, *layout)
    close(got, want)
    grad = rand(*got.shape)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)):
        close(a, b)


def test_deform_conv_of_zero_and_of_whole_offsets_is_a_convolution():
    x, conv = rand(2, 4, 6, 7, dtype=torch.float32), mmcv.ops.DeformConv2d(4, 5, 3, padding=1)
    zero = torch.zeros(2, 18, 6, 7)
    close(conv(x, zero), F.conv2d(x, conv.weight, padding=1), 1e-5)
    offset = zero.clone()
    offset[:, 0::2], offset[:, 1::2] = 1, -2  # y before x: one down, two left
    close(conv(x, offset), F.conv2d(F.pad(x, (3, -1, 0, 2)), conv.weight), 1e-5)


def test_deform_conv_weight_gradient_alone():
    x, offset, weight = rand(2, 2, 5, 5), rand(2, 18, 3, 3), rand(3, 2, 3, 3, grad=True)
    want = torch.autograd.grad(
        conv_by_sampling(x, offset, torch.ones(2, 9, 3, 3), weight, 1, 0, 1, 1, 1).sum(), weight
    )[0]
    close(torch.autograd.grad(mmcv.ops.deform_conv2d(x, offset, weight).sum(), weight)[0], want)


def test_modulated_deform_conv_reads_larger_offsets_from_their_start():
    x, weight = rand(2, 2, 3, 4), rand(3, 2, 3, 3)
    offset, mask = rand(2, 18, 6, 8, grad=True), rand(2, 9, 6, 8, grad=True)
    first = [taps.flatten(1)[:, : taps.shape[1] * 12].view(2, -1, 3, 4) for taps in (offset, mask)]
    want = conv_by_sampling(x, *first, weight, 1, 1, 1, 1, 1)
    got = mmcv.ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1)
    close(got, want)
    grad = rand(*got.shape)
    for a, b in zip(torch.autograd.grad(got, (offset, mask), grad), torch.autograd.grad(want, (offset, mask), grad)):
        close(a, b)


def test_what_is_not_a_number_shows_and_does_not_end_the_process():
    x, offset = rand(2, 4, 64, 64, grad=True), torch.zeros(2, 18, 64, 64, dtype=torch.float64)
    offset[1] = torch.nan
    out = mmcv.ops.deform_conv2d(x, offset, rand(5, 4, 3, 3), 1, 1)
    out.nan_to_num().sum().backward()
    assert out[1].isnan().all() and out[0].isfinite().all() and x.grad[0].isfinite().all()
    for op in REGION_OPS.values():
        for broken in (torch.nan, torch.inf):
            rois = torch.tensor([ROIS[0], [1, 2.0, broken, 30, 40]], dtype=torch.float64)
            out = op(x, rois)
            out.nan_to_num().sum().backward()
            assert out[1].isnan().all() and out[0].isfinite().all()


def test_deform_conv_of_channels_last_and_of_a_map_smaller_than_its_kernel():
    conv = mmcv.ops.DeformConv2d(4, 5, 3, padding=1)
    x, offset = rand(2, 4, 6, 7, dtype=torch.float32), rand(2, 18, 6, 7, dtype=torch.float32)
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        leaves = [t.clone(memory_format=form).requires_grad_() for t in (x, offset)]
        out = conv(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results):
        close(a, b, 1e-5)
    x = rand(2, 4, 2, 7, dtype=torch.float32)
    close(conv(x, torch.zeros(2, 18, 2, 7)), F.conv2d(x, conv.weight, padding=1), 1e-5)


@pytest.mark.parametrize("pack", [mmcv.ops.DeformConv2dPack, mmcv.ops.ModulatedDeformConv2dPack])
def test_deform_conv_packs_train_under_autocast(pack):
    layer, x = pack(4, 5, 3, padding=1), rand(2, 4, 6, 7, grad=True, dtype=torch.float32)
    want = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    close(out.float(), want, 3e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in [x, *layer.parameters()])
    assert layer.weight.grad.abs().sum() > 0 and layer.conv_offset.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_deform_conv_in_half_precision(dtype):
    x, offset, mask, weight, bias = rand(2, 4, 5, 5), rand(2, 18, 3, 3), rand(2, 9, 3, 3), rand(3, 4, 3, 3), rand(3)
    check_half(mmcv.ops.deform_conv2d, dtype, x, offset, weight)
    check_half(mmcv.ops.modulated_deform_conv2d, dtype, x, offset, mask, weight, bias)


# ------------------------------------------------------------------------------------------------ focal loss

TARGET = torch.tensor([0, 3, 4, 2, 1, 4])  # 4 is background of four classes


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("gamma, alpha, weighted", [(2.0, 0.25, False), (1.5, 0.6, True), (0.0, 0.5, False)])
def test_sigmoid_focal_loss_is_its_formula(gamma, alpha, weighted, reduction):
    x = (rand(6, 4) * 3).requires_grad_()
    weight = torch.rand(4, dtype=x.dtype) if weighted else None
    truth = F.one_hot(TARGET, 5)[:, :4].to(x)
    p = x.sigmoid() * truth + (1 - x.sigmoid()) * (1 - truth)
    want = -(alpha * truth + (1 - alpha) * (1 - truth)) * (1 - p) ** gamma * p.log()
    if weighted:
        want = want * torch.cat([weight, weight.new_ones(1)])[TARGET][:, None]
    want = {"none": want, "mean": want.sum() / 6, "sum": want.sum()}[reduction]
    got = mmcv.ops.sigmoid_focal_loss(x, TARGET, gamma, alpha, weight, reduction)
    close(got, want)
    grad = torch.ones_like(want)
    close(torch.autograd.grad(got, x, grad)[0], torch.autograd.grad(want, x, grad)[0])


@pytest.mark.parametrize("gamma, weighted", [(2.0, False), (0.5, True), (0.0, False)])
def test_softmax_focal_loss_is_its_formula(gamma, weighted):
    x, target = rand(5, 4, grad=True), torch.tensor([0, 3, -1, 2, 1])
    weight = torch.rand(4, dtype=x.dtype) if weighted else None
    p = x.softmax(1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    want = -0.25 * (1 - p) ** gamma * p.log() * (target >= 0)
    want = want * weight[target] if weighted else want
    close(mmcv.ops.softmax_focal_loss(x, target, gamma, 0.25, weight, "none"), want)
    # The backward of mmcv 2.3.6 cannot take the gradient of "none", which is (rows,) against (rows, classes).
    got = mmcv.ops.softmax_focal_loss(x, target, gamma, 0.25, weight, "mean")
    close(torch.autograd.grad(got, x)[0], torch.autograd.grad(want.sum() / 5, x)[0])


def test_focal_losses_stay_finite_at_certainty_and_accept_no_rows():
    for loss, target in ((mmcv.ops.sigmoid_focal_loss, [0, 1]), (mmcv.ops.softmax_focal_loss, [0, 1])):
        x = torch.tensor([[200.0, -200.0], [200.0, -200.0]], requires_grad=True)
        value = loss(x, torch.tensor(target), 0.5, 0.25, None, "sum")
        value.backward()
        assert torch.isfinite(value) and torch.isfinite(x.grad).all()
    x = torch.zeros(0, 4, requires_grad=True)
    value = mmcv.ops.sigmoid_focal_loss(x, torch.zeros(0, dtype=torch.long), 2.0, 0.25, None, "sum")
    value.backward()
    assert value == 0 and x.grad.shape == (0, 4)


@pytest.mark.parametrize("dtype", HALVES)
def test_focal_losses_in_half_precision(dtype):
    check_half(lambda x: mmcv.ops.sigmoid_focal_loss(x, TARGET, 2.0, 0.25, None, "none"), dtype, rand(6, 4))
    check_half(lambda x: mmcv.ops.softmax_focal_loss(x, TARGET.clamp(max=3), 2.0, 0.25, None, "sum"), dtype, rand(6, 4))


# ------------------------------------------------------------------------------- attention, CARAFE, masked, norm

SHAPES = torch.tensor([[4, 5], [2, 3]])
STARTS = torch.tensor([0, 20])


def attention_inputs(dtype=torch.float64):
    locations = torch.rand(2, 3, 2, 2, 2, 2, dtype=dtype) * 1.4 - 0.2  # some outside
    return [rand(2, 26, 2, 3, dtype=dtype), locations, rand(2, 3, 2, 2, 2, dtype=dtype).flatten(3).softmax(-1)]


def attend(value, locations, weights):
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    weights = weights.view(locations.shape[:-1])
    return MultiScaleDeformableAttnFunction.apply(value, SHAPES, STARTS, locations, weights, 64)


def test_deformable_attention_kernel_is_a_weighted_sum_of_samples():
    inputs = [t.requires_grad_() for t in attention_inputs()]
    value, locations, weights = inputs
    weights = weights.view(locations.shape[:-1])
    want = torch.zeros(2, 3, 2, 3, dtype=value.dtype)
    for n, query, head, level, point in np.ndindex(*locations.shape[:-1]):
        (height, width), start = SHAPES[level].tolist(), int(STARTS[level])
        features = value[n, start : start + height * width, head].T.reshape(3, height, width)
        x, y = locations[n, query, head, level, point] * torch.tensor([width, height]) - 0.5
        zeros = F.pad(features, (1, 1, 1, 1))  # zero outside, with a border of its own
        sample = bilinear(zeros, y + 1, x + 1) if -1 < y < height and -1 < x < width else 0
        want[n, query, head] = want[n, query, head] + sample * weights[n, query, head, level, point]
    got = attend(*inputs)
    close(got, want.flatten(2))
    grad = rand(*got.shape)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want.flatten(2), inputs, grad)):
        close(a, b)


@pytest.mark.parametrize("dtype", HALVES)
def test_deformable_attention_in_half_precision(dtype):
    check_half(attend, dtype, *attention_inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deformable_attention_module_trains(dtype):
    layer = mmcv.ops.MultiScaleDeformableAttention(16, 2, 2, 4, dropout=0.0, batch_first=True).to(dtype)
    query, value = (rand(2, n, 16, grad=True, dtype=torch.float32) for n in (5, 26))
    points = torch.rand(2, 5, 2, 2).to(dtype)
    out = layer(
        query.to(dtype),
        value=value.to(dtype),
        reference_points=points,
        spatial_shapes=SHAPES,
        level_start_index=STARTS,
    )
    out.float().square().sum().backward()
    assert out.shape == (2, 5, 16) and out.dtype == dtype
    assert all(p.grad.abs().sum() > 0 for p in (query, value, layer.value_proj.weight, layer.output_proj.weight))


def carafe_by_hand(x, masks, kernel, groups, scale):
    n, channels, height, width = x.shape
    padded = F.pad(x, [kernel // 2] * 4)
    out = torch.zeros(n, channels, height * scale, width * scale, dtype=x.dtype)
    for c, y, x_ in np.ndindex(channels, height * scale, width * scale):
        window = padded[:, c, y // scale : y // scale + kernel, x_ // scale : x_ // scale + kernel]
        group = c // (channels // groups)
        mask = masks[:, group * kernel**2 : (group + 1) * kernel**2, y, x_].view(n, kernel, kernel)
        out[:, c, y, x_] = (window * mask).sum((1, 2))
    return out


def test_carafe_reassembles_neighbourhoods():
    x, masks = rand(2, 4, 3, 4, grad=True), rand(2, 18, 6, 8, grad=True)
    got, want = mmcv.ops.carafe(x, masks, 3, 2, 2), carafe_by_hand(x, masks, 3, 2, 2)
    close(got, want)
    close(mmcv.ops.carafe_naive(x, masks, 3, 2, 2), want)
    grad = rand(*got.shape)
    want_grads = torch.autograd.grad(want, (x, masks), grad)
    for a, b in zip(torch.autograd.grad(got, (x, masks), grad), want_grads):
        close(a, b)
    # mmcv asks for a GPU in the naive version's backward, so the kernel is called as mmcv would call it.
    grads = torch.zeros_like(x), torch.zeros_like(masks)
    sizes = dict(kernel_size=3, group_size=2, scale_factor=2)
    sys.modules["mmcv._ext"].carafe_naive_backward(grad, x.detach(), masks.detach(), *grads, **sizes)
    for a, b in zip(grads, want_grads):
        close(a, b)


def test_carafe_pack_trains_channels_last():
    pack, x = mmcv.ops.CARAFEPack(4, 2), rand(1, 4, 3, 4, dtype=torch.float32)
    out = pack.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    out.square().sum().backward()
    assert out.shape == (1, 4, 6, 8) and pack.content_encoder.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_carafe_in_half_precision(dtype):
    check_half(lambda x, m: mmcv.ops.carafe(x, m, 3, 2, 2), dtype, rand(2, 4, 3, 4), rand(2, 18, 6, 8))


@pytest.mark.filterwarnings("ignore:This overload of addmm")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_masked_conv_computes_the_chosen_pixels(dtype):
    conv, x = mmcv.ops.MaskedConv2d(3, 5, (3, 5), padding=(1, 2)).to(dtype), rand(1, 3, 6, 7).to(dtype)
    mask = torch.rand(1, 6, 7) > 0.5
    out = conv(x, mask)
    assert out.dtype == dtype
    close(out.float(), (conv(x) * mask[:, None]).float(), 1e-5 if dtype == torch.float32 else 3e-2)
    assert not conv(x, torch.zeros(1, 6, 7)).any()


@pytest.mark.parametrize("mode", ["top", "bottom", "left", "right"])
def test_corner_pool_and_merge_cells_need_no_kernel(mode):
    from mmcv.ops.merge_cells import ConcatCell, GlobalPoolingCell, SumCell

    x = rand(1, 4, 5, 6, dtype=torch.float32)
    out = mmcv.ops.CornerPool(mode)(x)
    edge = {"top": out[:, :, 0], "bottom": out[:, :, -1], "left": out[..., 0], "right": out[..., -1]}[mode]
    close(edge, x.amax(2 if mode in ("top", "bottom") else 3))
    for cell in (SumCell, ConcatCell, GlobalPoolingCell):
        assert cell(4, 4)(x, x[:, :, :3, :3], (5, 6)).shape == x.shape


def test_point_sample_reads_between_pixels():
    x = torch.arange(12.0).view(1, 1, 3, 4)
    close(mmcv.ops.point_sample(x, torch.tensor([[[0.5, 0.5], [0.125, 1 / 6]]])), torch.tensor([[[5.5, 0.0]]]))


def sync_bn(x, weight, bias, mean, var):
    from mmcv.ops.sync_bn import SyncBatchNormFunction

    return SyncBatchNormFunction.apply(x, mean, var, weight, bias, 0.1, 1e-5, None, 1, "default")


def test_sync_batch_norm_of_one_rank_is_batch_norm():
    results = []
    leaves = [t.requires_grad_() for t in (rand(4, 3, 5, 6, dtype=torch.float32) * 2 + 1, torch.rand(3), torch.rand(3))]
    grad = rand(4, 3, 5, 6, dtype=torch.float32)
    for norm in (sync_bn, lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, True)):
        mean, var = torch.zeros(3), torch.ones(3)
        out = norm(*leaves, mean, var)
        results.append([out, mean, var, *torch.autograd.grad(out, leaves, grad)])
    for a, b in zip(*results):
        close(a, b, 1e-4)


# ------------------------------------------------------------------------------------------------ the install


def test_an_op_that_is_not_provided_says_so_when_used():
    with pytest.raises(NotImplementedError, match="'box_iou_rotated'.*MMCV_WITH_OPS=1 pip install") as error:
        mmcv.ops.box_iou_rotated(torch.rand(2, 5), torch.rand(2, 5))
    assert "\n" not in str(error.value)
    with pytest.raises(NotImplementedError, match="'roi_align_rotated_forward'"):
        mmcv.ops.RoIAlignRotated((2, 2), 1.0)(torch.rand(1, 1, 4, 4), torch.rand(1, 6))
    assert not hasattr(sys.modules["mmcv._ext"], "__file__")


def test_kernels_run_outside_autocast():
    from models.mmcv_kernels import boxes

    kernel = mmcv_kernels._without_autocast(lambda x: x @ x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernel(torch.eye(2)).dtype == torch.float32
    assert sys.modules["mmcv._ext"].nms.__wrapped__ is boxes.nms


def test_the_environment_report_still_works():
    from mmcv.utils import collect_env

    assert collect_env()["MMCV Compiler"] == "n/a"


# torch and timm are imported once; what is said on each further line is run in a process forked from there.
FORKED = """
import os, sys, timm, torch
for line in sys.stdin:
    folder, code = line.rstrip("\\n").split("|")
    if os.fork() == 0:
        sys.path[:0] = [folder] if folder else []
        exec(code)
        print(flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def run_python(*lines):
    """What each code prints in a process that has not imported `models` yet, with a folder first on its path."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        input="".join(f"{folder}|{code}\n" for folder, code in lines),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_importing_models_loads_no_mmcv_and_leaves_a_compiled_one_alone(tmp_path):
    loaded = "import models; print(*({'mmcv', 'mmdet', 'mmengine', 'mmcv._ext'} & sys.modules.keys()), end='')"
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    for folder in (plain, compiled):
        (folder / "mmcv").mkdir(parents=True)
        (folder / "mmcv/__init__.py").touch()
    (compiled / "mmcv/_ext.py").write_text("nms = 'compiled'")
    assert run_python(
        ("", loaded),
        (plain, "import mmcv, models; from mmcv import _ext; print(_ext.__class__.__name__, end='')"),
        (compiled, loaded),
        (compiled, "import models, mmcv._ext; print(mmcv._ext.nms, end='')"),
    ) == ["mmcv._ext", "_Kernels", "", "compiled"]


def test_kernels_too_late_for_mmdet_are_refused(monkeypatch):
    import mmdet.models  # noqa: F401

    installed = sys.modules["mmcv._ext"]
    mmcv_kernels.install()
    assert sys.modules["mmcv._ext"] is installed
    monkeypatch.delitem(sys.modules, "mmcv._ext")
    monkeypatch.delitem(sys.modules, "mmcv.ops")
    with pytest.raises(ImportError, match="import models first"):
        mmcv_kernels.install()


def test_mask_rcnn_of_mmdet_trains_and_predicts():
    from mmdet.registry import MODELS
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmdet.utils import register_all_modules
    from mmengine.hub import get_config
    from mmengine.structures import InstanceData

    register_all_modules()
    config = get_config("mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py").model
    config.backbone.init_cfg = None  # it downloads
    config.test_cfg.rcnn.score_thr = 0.0  # an untrained head is sure of nothing
    model = MODELS.build(config)
    shape = (64, 96)
    sample = DetDataSample(metainfo=dict(img_shape=shape, ori_shape=shape, pad_shape=shape, scale_factor=(1.0, 1.0)))
    masks = np.zeros((1, *shape), dtype=np.uint8)
    masks[0, 10:40, 20:70] = 1
    sample.gt_instances = InstanceData(
        bboxes=torch.tensor([[20.0, 10, 70, 40]]), labels=torch.tensor([3]), masks=BitmapMasks(masks, *shape)
    )
    image = torch.randn(1, 3, *shape)
    losses = model.loss(image, [sample])
    total, _ = model.parse_losses(losses)
    total.backward()
    assert torch.isfinite(total) and {"loss_mask", "loss_bbox", "loss_rpn_cls"} <= losses.keys()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.roi_head.mask_head.conv_logits.weight.grad.abs().sum() > 0
    with torch.no_grad():
        found = model.eval().predict(image, [sample])[0].pred_instances
    assert len(found) > 0 and found.bboxes.shape[1] == 4 and found.masks.shape[1:] == shape
