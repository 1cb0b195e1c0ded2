"""Test-time augmentation: views come back to the image they were made from, and merge."""

import pytest
import torch

from engine.config.schema import DataConfig, DetectorConfig
from engine.data.build import build_data
from engine.data.types import Classes
from engine.errors import ConfigError
from engine.inference.tta import MergedViews, ViewPreprocessor, parse_scales, show_views
from engine.modeling.detector import build_detector
from engine.modeling.precision import Precision
from engine.modeling.preprocessing import Preprocessor
from models.mmdet_setup import import_mmdet

import_mmdet()
from mmengine.structures import InstanceData  # noqa: E402

BOX = torch.tensor([[10.0, 20.0, 40.0, 60.0], [50.0, 5.0, 90.0, 30.0]])


class Config:
    detector = DetectorConfig(config="tiny_retinanet")


class Sees(torch.nn.Module):
    """A detector that finds the two boxes of BOX in every view, where that view has them."""

    with_mask = False

    def test_step(self, data):  # DetTTAModel wants it to be there
        raise NotImplementedError

    def predict(self, images, samples):
        for sample in samples:
            width = sample.ori_shape[1]
            boxes = BOX.clone()
            if sample.flip:
                boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
            sample.pred_instances = InstanceData(
                bboxes=boxes, scores=torch.tensor([0.9, 0.8]) - 0.1 * sample.flip, labels=torch.tensor([0, 1])
            )
        return samples


@pytest.fixture(scope="module")
def split():
    data = DataConfig(dataset="shapes", shapes=dict(train_images=10, val_images=5, image_size=96), scale=[96, 96])
    _, val, _ = build_data(data)
    show_views(val, [(96, 96), (128, 128)])
    return val


def batch(split, count=2):
    samples = [split.dataset[i] for i in range(count)]
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def test_every_image_has_each_scale_as_it_is_and_mirrored(split):
    data = batch(split)
    metas = [(s.flip, max(s.img_shape)) for s in data["data_samples"][0]]
    assert sorted(metas) == [(False, 96), (False, 128), (True, 96), (True, 128)]
    plain, mirrored = (
        data["inputs"][0][[s.flip and max(s.img_shape) == 96 for s in data["data_samples"][0]].index(True)],
        data["inputs"][0][[not s.flip and max(s.img_shape) == 96 for s in data["data_samples"][0]].index(True)],
    )
    assert torch.equal(plain, mirrored.flip(-1))


def test_boxes_of_mirrored_views_are_mirrored_back_and_merged(split):
    model = build_detector(DetectorConfig(config="tiny_retinanet"), Classes(tuple("abcdef"), (), tuple(range(1, 7))))
    views, _ = ViewPreprocessor(Preprocessor(model, torch.device("cpu"), Precision()))(batch(split), training=False)
    assert len(views) == 4 and views[0][0].shape[0] == 2
    for found in MergedViews(Sees(), Config).predict(views, None):
        found = found.pred_instances
        assert torch.equal(found.bboxes, BOX) and found.scores.tolist() == pytest.approx([0.9, 0.8])
        assert found.labels.tolist() == [0, 1]


def test_a_detector_with_masks_finds_boxes(split):
    classes = Classes(tuple("abcdef"), (), tuple(range(1, 7)))
    torch.manual_seed(0)
    model = build_detector(DetectorConfig(config="uninet_tiny_htcx"), classes).eval()
    views, _ = ViewPreprocessor(Preprocessor(model, torch.device("cpu"), Precision()))(batch(split), training=False)
    config = type("C", (), dict(detector=DetectorConfig(config="uninet_tiny_htcx")))
    with torch.no_grad():
        found = MergedViews(model, config).predict(views, None)
    for sample in found:
        assert "masks" not in sample.pred_instances and 0 < len(sample.pred_instances) <= 100
        height, width = sample.ori_shape
        assert (sample.pred_instances.bboxes <= torch.tensor([width, height, width, height]) + 1).all()


def test_scales_are_read_and_refused():
    assert parse_scales([], [1333, 800]) == [(1333, 800)]
    assert parse_scales(["1600x1200", "800X600"], [1, 1]) == [(1600, 1200), (800, 600)]
    for wrong in ("1600", "axb", "1600x1200x3", "8x8"):
        with pytest.raises(ConfigError, match="--tta takes scales such as 1600x1200"):
            parse_scales([wrong], [1, 1])
