"""Which detectors fit which task, and detectors that know one class only."""

import pytest
import torch
from tiny_detectors import MASK2FORMER_OPTIONS

from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.modeling.detector import build_detector
from engine.tasks.coco_scores import write_scores
from engine.tasks.mmdet_task import check_queries, check_task

CLASSES = Classes(("a", "b", "c"), (), (1, 2, 3))
WITH_STUFF = Classes(("a", "b", "c"), ("sky",), (1, 2, 3, 4))
MASK2FORMER = "mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco"


def built(config, classes=CLASSES, **options):
    with torch.device("meta"):
        return build_detector(DetectorConfig(config=config, options=options), classes)


def test_detectors_whose_masks_come_from_other_heads_do_instance_segmentation():
    rtmdet = built("mmdet::rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py")
    check_task(rtmdet, "rtmdet", "instance")
    with pytest.raises(ConfigError, match='"rtmdet" finds masks: set data.task to "instance"$'):
        check_task(rtmdet, "rtmdet", "detection")
    objects = built(f"{MASK2FORMER}.py", **MASK2FORMER_OPTIONS)
    check_task(objects, "mask2former", "instance")
    with pytest.raises(ConfigError, match='has no panoptic head: set detector.options {"test_cfg.panoptic_on": true'):
        check_task(objects, "mask2former", "panoptic")
    segments = built(f"{MASK2FORMER}-panoptic.py", WITH_STUFF, **MASK2FORMER_OPTIONS)
    check_task(segments, "mask2former", "panoptic")
    with pytest.raises(
        ConfigError, match='set data.task to "panoptic", or detector.options {"test_cfg.panoptic_on": fal'
    ):
        check_task(segments, "mask2former", "instance")


def test_more_queries_than_positions_are_refused_with_a_number_that_fits():
    dino = built("tiny_dino", num_queries=200)
    check_queries(dino, [128, 128])  # 256 + 64 + 16 positions
    with pytest.raises(
        ConfigError, match=r"200 queries from 3 feature maps, but images of 64x96 have only 126 positions"
    ):
        check_queries(dino, [64, 96])
    check_queries(built("mmdet::ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py"), [64, 64])
    check_queries(built("mmdet::detr/detr_r18_8xb2-500e_coco.py"), [64, 64])  # its queries are learnt


def test_a_detector_of_few_queries_is_not_asked_for_more_results_than_it_has():
    assert built("tiny_dino", num_queries=5).bbox_head.test_cfg["max_per_img"] == 15
    fusion = built(f"{MASK2FORMER}.py", **MASK2FORMER_OPTIONS).panoptic_fusion_head
    assert fusion.test_cfg["max_per_image"] == 30


def test_a_detector_of_one_class_is_scored_for_finding_objects_of_any(tmp_path):
    import numpy as np

    box = [10.0, 10.0, 30.0, 30.0]
    content = {
        "images": [{"id": 1, "height": 64, "width": 64}],
        "categories": [{"id": n, "name": name} for n, name in enumerate("abc", 1)],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [10, 10, 20, 20], "area": 400}],
    }
    found = [dict(image_id=1, boxes=np.array([box]), scores=np.array([0.9]), labels=np.array([0]))]

    def score(one_class):
        return write_scores(
            tmp_path, found, content, CLASSES, masks=False, backend="pycocotools", table=False, one_class=one_class
        )["bbox_mAP"]

    assert score(True) == pytest.approx(1.0) and score(False) == 0.0
    assert content["annotations"][0]["category_id"] == 3


def test_one_class_detectors_keep_one_class_whatever_the_data_has():
    assert built("mmdet::rpn/rpn_r50_fpn_1x_coco.py").bbox_head.num_classes == 1
    crowd = built("mmdet::crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py")
    assert crowd.roi_head.bbox_head.num_classes == 1


def test_a_box_outside_the_image_has_an_empty_mask():
    from mmdet.models.roi_heads.mask_heads import fcn_mask_head

    masks, inside = torch.ones(1, 1, 4, 4), torch.tensor([[2.0, 2.0, 8.0, 8.0]])
    for box in ([20.0, 20.0, 30.0, 30.0], [8.0, 8.0, 2.0, -5.0], [float("nan")] * 4):
        pasted, place = fcn_mask_head._do_paste_mask(masks, torch.tensor([box]), 10, 10, skip_empty=True)
        whole = torch.zeros(1, 10, 10)
        whole[(slice(None), *place)] = pasted
        assert whole.sum() == 0
    pasted, place = fcn_mask_head._do_paste_mask(masks, inside, 10, 10, skip_empty=True)
    assert pasted.sum() > 20 and place[0].stop <= 10


def test_ssd_predicts():
    from mmdet.registry import MODELS

    from engine.modeling.detector import model_config

    config = model_config(DetectorConfig(config="mmdet::ssd/ssd300_coco.py", options={}), CLASSES)
    head = MODELS.build({**config.bbox_head, "in_channels": [8] * 6, "test_cfg": config.test_cfg})
    maps = tuple(torch.randn(1, 8, size, size) for size in (38, 19, 10, 5, 3, 1))
    sample = dict(img_shape=(300, 300), ori_shape=(300, 300), scale_factor=(1.0, 1.0))
    (found,) = head.predict_by_feat(*head(maps), batch_img_metas=[sample], rescale=True)
    assert found.bboxes.shape[1] == 4 and set(found.labels.tolist()) <= {0, 1, 2}
