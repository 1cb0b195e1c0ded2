"""The gradient of RoIAlign (mean) as two matrix products: faster on small maps than scattering point by point.

Bilinear sampling is separable. A region has matrices A_y (bins x height) and A_x (bins x width), in which each row is
the mean of the tent functions of its samples. The output is A_y F A_x^T, and the gradient of F is the sum over the
regions of A_y^T G A_x. On a CPU torchvision adds to four pixels for every sample of every channel, one after the other:
a third of the step of a small two-stage detector. torchvision still does the forward pass, which is as fast as the
products, and the gradient for large maps, on GPUs, and for regions whose number of samples depends on their size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiply-adds of the products per addition of torchvision below which the products are used. On one core the two
# took equally long at 40.
_PRODUCTS_PER_ADDITION = 20
# The largest number of elements of the intermediate tensor, which has bins along one side and pixels along the other.
_CHUNK = 1 << 24


def is_faster(rois: Tensor, shape: torch.Size, size: tuple[int, int], sampling_ratio: int) -> bool:
    """Whether the products are faster for a map of this shape."""
    if rois.device.type != "cpu" or sampling_ratio <= 0:
        return False
    (bins_y, bins_x), (height, width) = size, shape[-2:]
    additions = 4 * sampling_ratio**2 * bins_y * bins_x
    return bins_y * width * (bins_x + height) < _PRODUCTS_PER_ADDITION * additions


def roi_align_gradient(
    grad: Tensor, rois: Tensor, shape: torch.Size, size: tuple[int, int], scale: float, ratio: int, aligned: bool
) -> Tensor:
    channels, height, width = shape[1:]
    total = grad.new_zeros(shape)
    for image, rows, along_y, along_x in _regions(rois, shape, size, scale, ratio, aligned):
        spread = grad[rows].transpose(1, 2).reshape(len(rows), size[0] * channels, size[1]) @ along_x
        spread = along_y.reshape(-1, height).t() @ spread.view(len(rows) * size[0], channels * width)
        total[image] += spread.view(height, channels, width).transpose(0, 1)
    return total


def _regions(
    rois: Tensor, shape: torch.Size, size: tuple[int, int], scale: float, ratio: int, aligned: bool
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Image by image, in chunks: the image, its rows of `rois`, and their matrices along y and x."""
    channels, height, width = shape[1:]
    images = rois[:, 0].long()
    x1, y1, x2, y2 = (rois[:, 1:] * scale - (0.5 if aligned else 0.0)).unbind(1)
    for image in images.unique().tolist():
        for rows in (images == image).nonzero()[:, 0].split(max(1, _CHUNK // (size[0] * channels * width))):
            yield (
                image,
                rows,
                _tents(y1[rows], y2[rows], size[0], height, ratio, aligned),
                _tents(x1[rows], x2[rows], size[1], width, ratio, aligned),
            )


def _tents(start: Tensor, stop: Tensor, bins: int, pixels: int, ratio: int, aligned: bool) -> Tensor:
    """(regions, bins, pixels): each pixel's share in the mean over a bin's samples along one direction."""
    length = stop - start if aligned else (stop - start).clamp(min=1.0)
    bin_size = (length / bins)[:, None, None]
    # The sum is in torchvision's order, so that a sample at the edge of a pixel falls on the same side.
    position = (
        start[:, None, None]
        + torch.arange(bins, dtype=start.dtype)[:, None] * bin_size
        + (torch.arange(ratio, dtype=start.dtype) + 0.5) * bin_size / ratio
    )
    outside = (position < -1.0) | (position > pixels)
    distance = (position.clamp(0, pixels - 1)[..., None] - torch.arange(pixels, dtype=start.dtype)).abs()
    return F.relu(1 - distance).masked_fill(outside[..., None], 0.0).mean(2)
