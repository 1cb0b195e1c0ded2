"""mmcv's kernels on the accelerator against the formulas: values and gradients, in plain torch, fp64, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine import distributed
from engine.doctor.finding import Finding, compared
from engine.doctor.small_run import full_precision
from models.mmdet_setup import import_mmdet

TOLERANCE = 1e-4  # fp32 against fp64, relative to the largest value; sums on GPUs are in any order


def imports() -> Finding:
    """A check of its own, for it takes seconds and may fail by itself."""
    _ops()
    return Finding("mmdet, mmcv.ops and our own parts are there")


def nms() -> Finding:
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(200, 2, generator=generator) * 30
    boxes = torch.cat([corner, corner + 1 + torch.rand(200, 2, generator=generator) * 20], 1)
    scores = torch.randperm(200, generator=generator) / 200  # no two alike, so the order is known
    ops, device = _ops(), distributed.device()
    kept = ops.nms(boxes.to(device), scores.to(device), 0.4)[1].tolist()
    want = _plain_nms(boxes.double(), scores, 0.4)
    wrong = len(set(kept) ^ set(want)) + (kept != want)
    return Finding(f"{wrong} of {len(want)} kept boxes differ (at most 0)", kept == want, {"kept": kept, "want": want})


def _plain_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    kept: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        x1, y1, x2, y2 = boxes[i]
        for x3, y3, x4, y4 in boxes[kept]:
            overlap = (min(x2, x4) - max(x1, x3)).clamp(min=0) * (min(y2, y4) - max(y1, y3)).clamp(min=0)
            if overlap > threshold * ((x2 - x1) * (y2 - y1) + (x4 - x3) * (y4 - y3) - overlap):
                break
        else:
            kept.append(i)
    return kept


def roi_align() -> Finding:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2, 5, 11, 13, generator=generator, dtype=torch.float64)
    rois = torch.tensor(
        [[0, 3.2, 4.1, 37.7, 30.4], [1, -4.3, -3.6, 20.9, 44.2], [1, 30.1, 20.3, 60.6, 50.8], [0, 8.4, 8.3, 8.9, 9.1]],
        dtype=torch.float64,
    )
    ops = _ops()

    def kernel(features: Tensor) -> Tensor:
        return ops.roi_align(features, rois.to(features), (3, 2), 0.25, 2, "avg", True)

    def formula(features: Tensor) -> Tensor:
        return torch.stack([_plain_roi(features[int(roi[0])], roi[1:] * 0.25 - 0.5, (3, 2), 2) for roi in rois])

    return _compare(kernel, formula, [features])


def _plain_roi(image: Tensor, box: Tensor, bins: tuple[int, int], samples: int) -> Tensor:
    """Each bin is the mean of `samples` x `samples` points; a point up to one pixel outside counts as on the border."""
    (x1, y1, x2, y2), (height, width) = box, image.shape[1:]
    steps = [(torch.arange(count * samples, dtype=box.dtype) + 0.5) / (count * samples) for count in bins]
    y, x = torch.meshgrid(y1 + (y2 - y1) * steps[0], x1 + (x2 - x1) * steps[1], indexing="ij")
    near = (y >= -1) & (y <= height) & (x >= -1) & (x <= width)
    values = _at(image, y.clamp(0, height - 1), x.clamp(0, width - 1)) * near
    return values.view(-1, bins[0], samples, bins[1], samples).mean((2, 4))


def focal_loss() -> Finding:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, 7, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(8, (40,), generator=generator)  # 7 is the background
    ops = _ops()

    def kernel(logits: Tensor) -> Tensor:
        return ops.sigmoid_focal_loss(logits, target.to(logits.device), 2.0, 0.25, None, "none")

    def formula(logits: Tensor) -> Tensor:
        probability, positive = logits.sigmoid(), target[:, None] == torch.arange(7)
        return torch.where(
            positive,
            -0.25 * (1 - probability) ** 2 * probability.log(),
            -0.75 * probability**2 * (1 - probability).log(),
        )

    return _compare(kernel, formula, [logits])


def deformable_convolution() -> Finding:
    """Modulated (version 2): two deformable groups, stride 2, offsets of more than a pixel, also over the border."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = [random(2, 4, 7, 9), random(2, 2 * 2 * 9, 4, 5) * 1.5, random(2, 2 * 9, 4, 5), random(6, 4, 3, 3)]
    ops = _ops()

    def kernel(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return ops.modulated_deform_conv2d(x, offset, mask, weight, None, 2, 1, 1, 1, 2)

    return _compare(kernel, _plain_deformable, inputs)


def _plain_deformable(x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    rows, columns = (torch.arange(count, dtype=x.dtype) * 2 - 1 for count in offset.shape[2:])
    output: Any = 0
    for tap in range(9):
        parts = []
        for group in range(2):
            move = offset[:, (group * 9 + tap) * 2 :][:, :2]
            y = rows[:, None] + tap // 3 + move[:, 0]
            z = columns[None] + tap % 3 + move[:, 1]
            channels = x[:, group * 2 : group * 2 + 2]
            sampled = torch.stack([_at(image, a, b) for image, a, b in zip(channels, y, z)])
            parts.append(sampled * mask[:, None, group * 9 + tap])
        output = output + torch.einsum("nchw,oc->nohw", torch.cat(parts, 1), weight[:, :, tap // 3, tap % 3])
    return output


def deformable_attention() -> Finding:
    """Multi-scale: two levels, three points per query and level, some outside the image."""
    generator = torch.Generator().manual_seed(4)
    shapes = torch.tensor([[6, 5], [3, 4]])
    start = torch.tensor([0, 30])
    value = torch.randn(2, 42, 2, 4, generator=generator, dtype=torch.float64)
    places = torch.rand(2, 7, 2, 2, 3, 2, generator=generator, dtype=torch.float64) * 1.2 - 0.1
    weights = torch.randn(2, 7, 2, 2, 3, generator=generator, dtype=torch.float64)
    _ops()
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction  # here: after our kernels

    def kernel(value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        device = value.device
        return MultiScaleDeformableAttnFunction.apply(value, shapes.to(device), start.to(device), places, weights, 64)

    def formula(value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        output: Any = 0
        for level, (height, width) in enumerate(shapes.tolist()):
            images = value[:, start[level] : start[level] + height * width].permute(0, 2, 3, 1)
            images = images.reshape(2, 2, 4, height, width)  # batch, head, channel
            x, y = places[:, :, :, level, :, 0] * width - 0.5, places[:, :, :, level, :, 1] * height - 0.5
            sampled = torch.stack(
                [torch.stack([_at(images[n, h], y[n, :, h], x[n, :, h]) for h in range(2)]) for n in range(2)]
            )  # batch, head, channel, query, point
            output = output + torch.einsum("nhcqp,nqhp->nqhc", sampled, weights[:, :, :, level])
        return output.flatten(2)

    return _compare(kernel, formula, [value, places, weights])


def _at(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Values of an image (channels, height, width) between its pixels, bilinear; zero outside."""
    height, width = image.shape[1:]
    total: Any = 0
    for dy in (0, 1):
        for dx in (0, 1):
            row, column = y.detach().floor() + dy, x.detach().floor() + dx
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            pixel = image[:, row.clamp(0, height - 1).long(), column.clamp(0, width - 1).long()]
            total = total + pixel * ((1 - (y - row).abs()) * (1 - (x - column).abs()) * inside)
    return total


def _compare(kernel: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Finding:
    """Values, and gradients by each input, of the same random direction."""
    here = [tensor.to(distributed.device(), torch.float32).requires_grad_() for tensor in inputs]
    plain = [tensor.clone().requires_grad_() for tensor in inputs]
    with full_precision():
        got = kernel(*here)
        want = formula(*plain)
        direction = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=want.dtype)
        got.backward(direction.to(got))
        want.backward(direction)
    gradients = max(_worst(a.grad, b.grad) for a, b in zip(here, plain))
    return compared({"values": _worst(got, want), "gradients": gradients}, TOLERANCE)


def _worst(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None or got.shape != want.shape:
        return float("inf")
    return float((got.detach().cpu().double() - want.detach()).abs().max() / want.detach().abs().max())


def _ops() -> Any:
    import_mmdet()
    import mmcv.ops  # here: our kernels must be in place first

    return mmcv.ops


KERNELS: dict[str, Callable[[], Finding]] = {
    "nms": nms,
    "roi_align": roi_align,
    "focal loss": focal_loss,
    "deformable conv": deformable_convolution,
    "deformable attention": deformable_attention,
}
