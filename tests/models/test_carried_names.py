"""The closed list: nothing dangerous is registered without being refused, and nothing that configs need is refused."""

import inspect
import re

import pytest

from models.mmdet_setup import import_mmdet

import_mmdet()

from models.carried_names import REFUSED, known_names, refusals, registries  # noqa: E402
from models.zoo import zoo_configs  # noqa: E402

# What a class must not do with a text of its config: evaluate it, import it, read it as a file, hand it to a loader.
DANGER = re.compile(
    r"(?<!\.)\b(eval|exec|compile|__import__|open)\(|import_module|subprocess|os\.(system|popen|exec)|pickle\.load"
    r"|torch\.load|load_checkpoint|load_state_dict_from_url|fromfile|from_pretrained|np\.load|mmengine\.load|(?<!\w)load\("
    r"|fileio\.|\bget\(\s*(filename|name|results)|getattr\((albumentations|imagecorruptions)|create_model"
)
# Registered classes in which such words stand, and why they may be named.
HARMLESS = {
    "DetectoRS_ResNet": "mmengine's loader, which reads plain tensors and downloads nothing",
    "PyramidVisionTransformer": "the same",
    "SwinTransformer": "the same",
    "TimmBackbone": "ours: it refuses every argument that names a file",
    "LoadAnnotations": "reads what the annotations name; backend_args are refused",
    "LoadImageFromFile": "the same",
    "LoadImageFromNDArray": "the same",
    "LoadPanopticAnnotations": "the same",
    "LoadTrackAnnotations": "the same",
}


def test_no_registered_class_is_dangerous_without_being_refused():
    found = {}
    for registry in registries():
        for name, kind in registry.module_dict.items():
            source = re.sub(r'""".*?"""', "", inspect.getsource(kind), flags=re.S)
            hits = DANGER.findall(source)
            if hits:
                found[name] = hits
    assert {
        "CameraMotionCompensation",
        "KnowledgeDistillationSingleStageDetector",
        "Albu",
    } <= found.keys()  # it can see
    assert found.keys() - REFUSED.keys() <= HARMLESS.keys(), found


def test_all_refused_names_exist():
    assert REFUSED.keys() <= known_names()


@pytest.mark.parametrize("name", zoo_configs())
def test_every_detector_of_the_zoo_may_be_named(name):
    from mmengine.config import Config

    from engine.modeling.adapting import drop_downloads

    model = Config(dict(model=Config.fromfile(str(zoo_configs()[name])).model)).model
    drop_downloads(model)
    assert list(refusals(model, "model")) == []


@pytest.mark.parametrize(
    "kind",
    ["os.system", "os", "mmdet.models.necks.FPN", "nn.ReLU", "", "a b", "Fpn", "mmpretrain.ResNet", 3, None, ["FPN"]],
)
def test_only_registered_names_are_names(kind):
    assert len(list(refusals({"neck": [{"deep": {"type": kind}}]}, "model"))) >= 1
    assert list(refusals({"neck": [{"deep": {"type": "mmdet.FPN"}}]}, "model")) == []
