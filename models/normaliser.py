"""What mmdet's heads divide their losses by: the objects of the micro-batch, or their mean over ranks.

Many heads (DETRs, FCOS, ATSS, YOLOX, ...) average this number over ranks with mmdet's `reduce_mean`. Then the gradient
depends on which micro-batches happen to run at the same time. Every head module has `reduce_mean` under its own name,
but all of them end in `mmdet.utils.dist_utils`, which asks torch whether there are other ranks. That question is
answered here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class _Distributed:
    """torch.distributed as `mmdet.utils.dist_utils` sees it."""

    over_ranks = True  # mmdet's own way, outside `normalised`

    def is_initialized(self) -> bool:
        return self.over_ranks and dist.is_initialized()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


@contextlib.contextmanager
def normalised(*, over_ranks: bool) -> Iterator[None]:
    """Inside, heads normalise by the mean over ranks, or by their own micro-batch alone."""
    from mmdet.utils import dist_utils

    if not isinstance(dist_utils.dist, _Distributed):
        dist_utils.dist = _Distributed()
    distributed = dist_utils.dist
    before, distributed.over_ranks = distributed.over_ranks, over_ranks
    try:
        yield
    finally:
        distributed.over_ranks = before
