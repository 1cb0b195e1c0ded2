"""What heads divide by on several ranks, and YOLOX's image sizes."""

import pytest
import torch


def both_ways():
    import torch.distributed as dist

    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from mmdet.models.dense_heads import detr_head
    from mmdet.utils import reduce_mean

    from models.normaliser import normalised

    objects = torch.tensor([1.0 + 4 * dist.get_rank()])
    assert detr_head.reduce_mean is reduce_mean  # under its own name in every head
    with normalised(over_ranks=False):
        own = float(reduce_mean(objects))
        with normalised(over_ranks=True):
            inner = float(reduce_mean(objects))
    with normalised(over_ranks=True):
        mean = float(reduce_mean(objects))
    return own, inner, mean, float(reduce_mean(objects))


def test_a_head_counts_its_own_objects_or_those_of_all_ranks(ranks):
    for rank, (own, inner, mean, outside) in enumerate(ranks.run(both_ways, 2)):
        assert own == 1.0 + 4 * rank and inner == mean == outside == 3.0


def sizes(steps, seed=5):
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    from engine.modeling.progress import Progress, tell
    from models.step_resize import StepRandomResize

    resize = StepRandomResize(random_size_range=(64, 320), interval=10)
    found = {}
    for step in steps:
        tell(Progress(step=step, steps=100, steps_per_epoch=7, seed=seed))
        sample = DetDataSample(metainfo=dict(img_shape=(96, 120), pad_shape=(96, 128)))
        sample.gt_instances = InstanceData(bboxes=torch.tensor([[12.0, 24.0, 48.0, 96.0]]))
        images, (sample,) = resize(torch.zeros(1, 3, 96, 128), [sample])
        found[step] = tuple(images.shape[-2:])
        factor = torch.tensor([found[step][1] / 128, found[step][0] / 96]).repeat(2)
        torch.testing.assert_close(sample.gt_instances.bboxes, torch.tensor([[12.0, 24.0, 48.0, 96.0]]) * factor)
    return found


def test_the_size_of_a_step_does_not_depend_on_the_steps_before():
    straight = sizes(range(60))
    assert all(straight[step] == (96, 128) for step in range(10))
    assert all(straight[step] == straight[step - step % 10] for step in straight)
    assert len({straight[step] for step in range(10, 60, 10)}) > 1
    assert sizes([23, 47, 59]) == {step: straight[step] for step in (23, 47, 59)}
    assert sizes([20, 30, 40, 50], seed=6) != {step: straight[step] for step in (20, 30, 40, 50)}


@pytest.mark.parametrize("step, epoch", [(0, 0), (6, 0), (7, 1), (99, 14)])
def test_mmdet_is_told_where_the_run_is(step, epoch):
    from mmengine.logging import MessageHub

    from engine.modeling.progress import Progress, tell

    tell(Progress(step=step, steps=100, steps_per_epoch=7, seed=0))
    hub = MessageHub.get_current_instance()
    assert [hub.get_info(key) for key in ("iter", "epoch", "max_iters", "max_epochs")] == [step, epoch, 100, 15]
