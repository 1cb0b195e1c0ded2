"""Weight files: what fits is copied and reported, what does not fit is told, and no pickled code runs."""

import os

import pytest
import torch

from engine.checkpoints.reading import load_weights, read_weights
from engine.config.schema import DetectorConfig
from engine.data.types import Classes
from engine.modeling.weights import LoadReport, WeightsError, read_file

THIN = {"backbone.base_channels": 8, "neck.in_channels": [8, 16, 32, 64]}


def detector(classes=2, options=THIN):
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from engine.modeling.detector import build_detector

    names = tuple("abcdefgh"[:classes])
    model = build_detector(
        DetectorConfig(config="tiny_retinanet", options=options), Classes(names, (), tuple(range(1, classes + 1)))
    )
    # Numbers that no initialisation gives, so that a tensor which was not copied is seen.
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn_like(value) if value.is_floating_point() else torch.randint_like(value, 10**6))
    return model


@pytest.fixture(scope="module")
def source():
    return {name: value.clone() for name, value in detector().state_dict().items()}


def equal(state, tensors):
    return all(torch.equal(state[name], value) for name, value in tensors.items())


WRAPPINGS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "meta": {"epoch": 3}, "optimizer": {"lr": 0.1}},
    "model": lambda state: {"model": state},
    "data parallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "deepspeed": lambda state: {"module": state, "global_steps": 4},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_detector_file_is_loaded_whatever_it_is_wrapped_in(tmp_path, source, wrapping):
    torch.save(WRAPPINGS[wrapping](source), tmp_path / "w.pth")
    model = detector()
    report = load_weights(model, tmp_path / "w.pth", drop_mismatched=False)
    assert equal(model.state_dict(), source)
    assert (len(report.matched), report.missing, report.unexpected, report.dropped) == (len(source), [], [], [])


def test_safetensors_and_files_of_old_torch_are_read(tmp_path, source):
    from safetensors.torch import save_file

    save_file(source, str(tmp_path / "w.safetensors"))
    torch.save(source, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("w.safetensors", "old.pth"):
        model = detector()
        load_weights(model, tmp_path / name, drop_mismatched=False)
        assert equal(model.state_dict(), source), name


def test_our_own_file_says_how_it_was_made(tmp_path, source):
    meta = {"step": 4, "dataset_meta": {"classes": ["a", "b"]}, "config": {"run": {"seed": 1}}}
    torch.save({"state_dict": source, "meta": meta}, tmp_path / "step-4.pth")
    tensors, read_meta = read_file(tmp_path / "step-4.pth")
    assert read_meta == meta and equal(tensors, source) and tensors.keys() == source.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["step-4.pth"]


def test_a_backbone_file_fills_the_backbone_and_nothing_else(tmp_path, source):
    backbone = {name.removeprefix("backbone."): value for name, value in source.items() if name.startswith("backbone.")}
    torch.save({**backbone, "fc.weight": torch.zeros(10, 64)}, tmp_path / "resnet.pth")
    model = detector()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = load_weights(model, tmp_path / "resnet.pth", drop_mismatched=False)
    after = model.state_dict()
    assert equal(after, {f"backbone.{name}": value for name, value in backbone.items()})
    assert equal(after, {name: value for name, value in before.items() if not name.startswith("backbone.")})
    assert report.unexpected == ["backbone.fc.weight"] and set(report.missing) == {
        name for name in after if not name.startswith("backbone.")
    }


TIMM = {  # models that timm hands out under its own names, with sequences moved up, and wrapped once more
    "resnet10t": ([64, 128, 256, 512], {}),
    "convnext_atto": ([40, 80, 160, 320], {"out_indices": [0, 1, 2, 3]}),
    "vit_tiny_patch16_224": ([192] * 4, {"out_indices": [0, 1, 2, 3], "depth": 4}),
    "swin_tiny_patch4_window7_224": ([96, 192, 384, 768], {"out_indices": [0, 1, 2, 3], "depths": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("name", TIMM)
def test_a_timm_file_fills_a_timm_backbone(tmp_path, name):
    import timm

    channels, options = TIMM[name]
    model = detector(
        options={
            "backbone": {"type": "TimmBackbone", "_delete_": True, "model_name": name, **options},
            "neck.in_channels": channels,
        }
    )
    file = timm.create_model(name, **{k: v for k, v in options.items() if k != "out_indices"})
    torch.save(file.state_dict(), tmp_path / "timm.pth")
    report = load_weights(model, tmp_path / "timm.pth", drop_mismatched=False)
    assert not [n for n in report.missing if n.startswith("backbone.")]
    assert all(n.split(".")[-2] in ("fc", "norm", "head") for n in report.unexpected)  # the classifier
    # The same maps as timm's own model gives, so nothing went to a wrong place.
    torch.manual_seed(0)
    images = torch.randn(1, 3, 224, 224)
    file.eval(), model.eval()
    with torch.no_grad():
        whole = file.forward_features(images)
        last = model.backbone(images)[-1]
    if name.startswith("vit"):
        last = file.norm(torch.cat([torch.zeros(1, 1, 192), last.flatten(2).mT], 1))[:, 1:]
        whole = whole[:, 1:]
    elif name.startswith("swin"):
        last = file.norm(last.permute(0, 2, 3, 1))
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-4)


def test_another_number_of_classes_is_refused_by_name_or_dropped_where_asked(tmp_path, source):
    torch.save(source, tmp_path / "two.pth")
    model = detector(classes=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        WeightsError,
        match=r"bbox_head.retina_cls.bias is \(\d+,\) in the file and \(\d+,\) here \(another "
        r"number of classes\?\); set detector.drop_mismatched to true",
    ):
        load_weights(model, tmp_path / "two.pth", drop_mismatched=False)
    assert equal(model.state_dict(), before)  # a refused file changes nothing
    report = load_weights(model, tmp_path / "two.pth", drop_mismatched=True)
    odd = ["bbox_head.retina_cls.bias", "bbox_head.retina_cls.weight"]
    assert report.dropped == odd
    assert equal(model.state_dict(), {**source, **{name: before[name] for name in odd}})


def test_the_report_counts_and_names():
    text = str(LoadReport("w.pth", ["a", "b"], ["c"], ["d", "e", "f", "g"], []))
    assert (
        text
        == "w.pth: 2 tensors matched, 1 of the model not in the file (c), 4 of the file not in the model (d, e, f, ...)"
    )
    assert str(LoadReport("w.pth", ["a"], [], [], ["x"])).endswith(", 1 of another shape left out (x)")


class Hostile:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_pickle_is_refused_and_not_run(tmp_path, source, zipped):
    victim = tmp_path / "victim"
    torch.save(
        {"state_dict": source, "meta": Hostile(victim)}, tmp_path / "evil.pth", _use_new_zipfile_serialization=zipped
    )
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert victim.exists()  # it does bite whoever trusts it
    victim.unlink()
    with pytest.raises(WeightsError, match="evil.pth cannot be read as plain tensors") as caught:
        read_weights(tmp_path / "evil.pth")
    assert not victim.exists() and "\n" not in str(caught.value)


def test_files_that_hold_no_weights_of_this_detector_are_told_apart(tmp_path):
    torch.save({"encoder.weight": torch.zeros(3)}, tmp_path / "other.pth")
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "numbers.pth")
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("not weights")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "empty.pth").touch()
    model = detector()
    for name, words in {
        "other": 'no tensor that fits this detector: its names begin like "encoder.weight"',
        "numbers": "holds no named tensors",
        "list": "holds no named tensors",
        "text": "cannot be read as plain tensors",
        "empty": "cannot be read as plain tensors",
        "absent": "does not exist",
    }.items():
        with pytest.raises(WeightsError, match=words) as caught:
            load_weights(model, tmp_path / f"{name}.pth", drop_mismatched=True)
        assert f"{name}.pth" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match="empty.safetensors cannot be read as plain tensors"):
        read_weights(tmp_path / "empty.safetensors")
