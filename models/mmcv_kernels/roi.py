"""Pooling of regions of a feature map: RoIAlign (mean and max), RoIPool and DeformRoIPool.

A region (image, x1, y1, x2, y2) is divided into bins, and each bin samples the map bilinearly at a grid of points.
Points up to one pixel outside the map take the value of its border, points further away are zero. torchvision has the
mean over these points. The maximum, and bins moved by learnt offsets, are sampled here. RoIPool takes whole pixels by
its own rule, which differs from torchvision's (that one rounds the corners of the region).

A region that is not finite gives NaN, so that it shows in the loss: torchvision 0.29 may end the process for one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import torchvision  # noqa: F401  registers torch.ops.torchvision
from torch import Tensor

from models.mmcv_kernels.precision import widen
from models.mmcv_kernels.roi_align_gradient import is_faster, roi_align_gradient

__all__ = [
    "deform_roi_pool_backward",
    "deform_roi_pool_forward",
    "roi_align_backward",
    "roi_align_forward",
    "roi_pool_backward",
    "roi_pool_forward",
]

_MAX = 0  # mmcv's pool_mode


def roi_align_forward(
    x: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    x, rois = widen(x, rois)
    rois, broken = _finite(rois)
    size = (aligned_height, aligned_width)
    if pool_mode != _MAX:
        output.copy_(torch.ops.torchvision.roi_align(x, rois, spatial_scale, *size, sampling_ratio, aligned))
    else:
        for image, rows, grid, points in _bins(rois, size, spatial_scale, sampling_ratio, aligned):
            best, index = _sample(x[image], points).max(-1)
            output[rows] = best.to(output.dtype)
            # The position within the bin's grid is exact in half precision; mmcv's feature coordinates are not.
            argmax_y[rows] = (index // grid[1]).to(argmax_y.dtype)
            argmax_x[rows] = (index % grid[1]).to(argmax_x.dtype)
    output.masked_fill_(broken, torch.nan)


def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    *,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    grad_output, rois = widen(grad_output, rois)
    rois, _ = _finite(rois)
    size = (aligned_height, aligned_width)
    if pool_mode != _MAX and is_faster(rois, grad_input.shape, size, sampling_ratio):
        shape = grad_input.shape
        grad_input.copy_(roi_align_gradient(grad_output, rois, shape, size, spatial_scale, sampling_ratio, aligned))
        return
    if pool_mode != _MAX:
        arguments = (*size, *grad_input.shape, sampling_ratio, aligned)
        grad_input.copy_(torch.ops.torchvision._roi_align_backward(grad_output, rois, spatial_scale, *arguments))
        return
    total = grad_output.new_zeros(grad_input.shape)
    for image, rows, grid, points in _bins(rois, size, spatial_scale, sampling_ratio, aligned):
        # The chosen samples are linear in the map, so the gradient does not need its values, which are not known here.
        features = torch.zeros_like(total[image], requires_grad=True)
        index = (argmax_y[rows] * grid[1] + argmax_x[rows]).long()
        with torch.enable_grad():
            chosen = _sample(features, points).gather(-1, index[..., None])[..., 0]
        total[image] += torch.autograd.grad(chosen, features, grad_output[rows])[0]
    grad_input.copy_(total)


def deform_roi_pool_forward(
    x: Tensor,
    rois: Tensor,
    offset: Tensor,
    output: Tensor,
    *,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    x, rois, offset = widen(x, rois, offset)
    rois, broken = _finite(rois)
    bins = _bins(rois, (pooled_height, pooled_width), spatial_scale, sampling_ratio, aligned=True)
    for image, rows, _, points in bins:
        if offset.numel():
            points = _move(points, rois[rows], offset[rows], gamma * spatial_scale)
        output[rows] = _sample(x[image], points).mean(-1).to(output.dtype)
    output.masked_fill_(broken, torch.nan)


def deform_roi_pool_backward(
    grad_output: Tensor,
    x: Tensor,
    rois: Tensor,
    offset: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    *,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    gamma: float,
) -> None:
    x, rois, offset, grad_output = widen(x, rois, offset, grad_output)
    rois, _ = _finite(rois)
    total, total_offset = torch.zeros_like(x), torch.zeros_like(offset)
    bins = _bins(rois, (pooled_height, pooled_width), spatial_scale, sampling_ratio, aligned=True)
    for image, rows, _, points in bins:
        inputs = [x[image].detach().requires_grad_()]
        with torch.enable_grad():
            if offset.numel():
                inputs.append(offset[rows].detach().requires_grad_())
                points = _move(points, rois[rows], inputs[1], gamma * spatial_scale)
            pooled = _sample(inputs[0], points).mean(-1)
        grads = torch.autograd.grad(pooled, inputs, grad_output[rows])
        total[image] += grads[0]
        if offset.numel():
            total_offset[rows] = grads[1]
    grad_input.copy_(total)
    grad_offset.copy_(total_offset)


def _finite(rois: Tensor) -> tuple[Tensor, Tensor]:
    """The regions with non-finite values set to zero, and a mask (rows, 1, 1, 1) of the regions that had any."""
    return rois.nan_to_num(0, 0, 0), ~rois.isfinite().all(1)[:, None, None, None]


def _bins(
    rois: Tensor, size: tuple[int, int], scale: float, sampling_ratio: int, aligned: bool
) -> Iterator[tuple[int, Tensor, tuple[int, int], Tensor]]:
    """Group regions by image and grid: image, rows of `rois`, grid, points (rows, height, width, samples, xy)."""
    start = rois[:, 1:3] * scale - 0.5 * aligned
    extent = rois[:, 3:5] * scale - 0.5 * aligned - start
    if not aligned:
        extent = extent.clamp(min=1)
    step = extent / extent.new_tensor(size[::-1])
    # In mmcv a region without extent has no samples, and its maximum is the lowest float. Here it gets one sample.
    grid = step.ceil().clamp(min=1) if sampling_ratio <= 0 else torch.full_like(step, sampling_ratio)
    kinds, kind = torch.unique(torch.cat([rois[:, :1], grid], 1).long(), dim=0, return_inverse=True)
    for number, (image, columns, lines) in enumerate(kinds.tolist()):
        rows = (kind == number).nonzero()[:, 0]
        x = _along(start[rows, 0], step[rows, 0], size[1], columns)
        y = _along(start[rows, 1], step[rows, 1], size[0], lines)
        shape = (len(rows), *size, lines, columns)
        points = torch.stack([x[:, None, :, None, :].expand(shape), y[:, :, None, :, None].expand(shape)], -1)
        yield image, rows, (lines, columns), points.flatten(3, 4)


def _along(start: Tensor, step: Tensor, bins: int, samples: int) -> Tensor:
    """Coordinates (rows, bins, samples) along one axis: the centres of the `samples` equal parts of each bin."""
    parts = (torch.arange(samples).to(start) + 0.5) / samples
    return start[:, None, None] + step[:, None, None] * (torch.arange(bins).to(start)[:, None] + parts)


def _sample(features: Tensor, points: Tensor) -> Tensor:
    """Bilinear values (rows, channels, height, width, samples) of one image's map (channels, height, width)."""
    size = points.new_tensor(features.shape[:0:-1])
    grid = (2 * points + 1) / size - 1
    values = F.grid_sample(features[None], grid.flatten(1, 2).flatten(0, 1)[None], "bilinear", "border", False)
    values = values.view(len(features), *points.shape[:-1]).transpose(0, 1)
    return values * ((points >= -1) & (points <= size)).all(-1)[:, None]


def _move(points: Tensor, rois: Tensor, offset: Tensor, gamma: float) -> Tensor:
    """Shifts each bin by its offset (rows, xy, height, width), in units of `gamma` times the region's size."""
    shift = offset.movedim(1, -1) * (rois[:, 3:5] - rois[:, 1:3])[:, None, None] * gamma
    return points + shift[:, :, :, None]


def roi_pool_forward(
    x: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax: Tensor,
    *,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    """`argmax` is the position of the maximum in its map, y * width + x, or -1 for a bin without pixels."""
    x, rois = widen(x, rois)
    rois, broken = _finite(rois)
    height, width = x.shape[2:]
    top, bottom = _pixels(rois[:, 2], rois[:, 4], spatial_scale, pooled_height, height)
    left, right = _pixels(rois[:, 1], rois[:, 3], spatial_scale, pooled_width, width)
    planes = _planes(rois, x.shape)
    flat = x.flatten()
    best = x.new_full(output.shape, -torch.inf)
    argmax.fill_(-1)
    # Bins differ in size: loop over the pixels of the largest bin, for all bins at once.
    for dy in range(int((bottom - top).max()) if len(rois) else 0):
        for dx in range(int((right - left).max())):
            row, column = top[:, :, None] + dy, left[:, None, :] + dx
            inside = (row < bottom[:, :, None]) & (column < right[:, None, :])
            index = torch.where(inside, row * width + column, 0)[:, None]
            value = flat[planes + index]
            better = inside[:, None] & (value > best)
            best = torch.where(better, value, best)
            argmax.copy_(torch.where(better, index, argmax))
    output.copy_(torch.where(argmax < 0, 0, best)).masked_fill_(broken, torch.nan)


def roi_pool_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax: Tensor,
    grad_input: Tensor,
    *,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
) -> None:
    grad_output, rois = widen(grad_output, rois)
    rois, _ = _finite(rois)
    index = _planes(rois, grad_input.shape) + argmax.clamp(min=0)
    total = grad_output.new_zeros(grad_input.numel())
    total.index_add_(0, index.flatten(), torch.where(argmax < 0, 0, grad_output).flatten())
    grad_input.copy_(total.view(grad_input.shape))


def _planes(rois: Tensor, shape: torch.Size) -> Tensor:
    """The index in the flattened map at which the plane of each region and channel starts (rows, channels, 1, 1)."""
    planes = rois[:, :1].long() * shape[1] + torch.arange(shape[1], device=rois.device)
    return planes[:, :, None, None] * (shape[2] * shape[3])


def _pixels(first: Tensor, last: Tensor, scale: float, bins: int, limit: int) -> tuple[Tensor, Tensor]:
    """The first pixel of each bin and the one after its last. A bin includes every pixel that it touches."""
    start = first * scale
    extent = (last + 1) * scale - start
    edges = start[:, None] + torch.arange(bins + 1).to(start) * (extent / bins)[:, None]
    low, high = edges[:, :-1].floor(), edges[:, 1:].ceil()
    high = torch.where(extent[:, None] > 0, high, low)
    return low.long().clamp(0, limit), high.long().clamp(0, limit)
