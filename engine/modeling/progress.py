"""Where a run is, for the parts of mmdet that ask: TOOD changes its targets after some epochs, BoxInst warms up.

They read mmengine's MessageHub, which mmengine's runner fills. An iteration is an optimizer step here.
"""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    step: int  # of the optimizer, from 0
    steps: int
    steps_per_epoch: int
    seed: int  # not mmengine's: for parts that draw numbers which all ranks share


def tell(progress: Progress) -> None:
    from mmengine.logging import MessageHub  # here: it takes a second

    hub = MessageHub.get_current_instance()
    for name, value in (
        ("iter", progress.step),
        ("epoch", progress.step // progress.steps_per_epoch),
        ("max_iters", progress.steps),
        ("max_epochs", -(-progress.steps // progress.steps_per_epoch)),
        ("seed", progress.seed),
    ):
        hub.update_info(name, value)
