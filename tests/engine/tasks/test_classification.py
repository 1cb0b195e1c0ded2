"""Classifiers: the same weights on any ranks; targets, accuracy and checkpoints checked by other means."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import TINY, difference, distance, merged, saved_weights, train_tiny

from engine.checkpoints.reading import load_weights
from engine.config.origin import Origin
from engine.config.schema import ClassificationConfig, DetectorConfig
from engine.data.types import Classes
from engine.errors import ConfigError, DataError, UserError
from engine.modeling.weights import WeightsError
from engine.recipes.load import parse_config

CLASSES = Classes(tuple("abcdefgh"), (), tuple(range(1, 9)))
# ConvNeXt has layer norms, so that a sample does not depend on its micro-batch; three images cannot be mixed in pairs.
SMALL = {
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 3,
    "detector": {"config": "timm::convnext_atto", "options": {"depths": [1, 1, 1, 1], "dims": [8, 16, 24, 32]}},
    "data": {
        "task": "classification",
        "dataset": "shapes",
        "scale": [1333, 800],
        "train_scales": None,
        "classification": {"image_size": 32, "auto_augment": "rand-m5-mstd0.5"},
    },
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}


def small(**changes):
    return merged(changes, SMALL)


def config_of(changes):
    return parse_config(merged(changes, merged(SMALL, TINY)), origin=Origin.USER)


def runs(cases):
    return [train_tiny(changes) for changes in cases]


def losses(result):
    return [record["loss"] for record in result["records"]]


@pytest.fixture(scope="module")
def reference(ranks):
    """One rank, two accumulated micro-batches, stage 0."""
    return ranks.run(runs, 1, [SMALL])[0][0]


def test_stages_and_world_sizes_reach_the_same_weights(ranks, reference):
    cases = [small(zero_optimization={"stage": stage}) for stage in (0, 2, 3)]
    for stage, result in zip((0, 2, 3), ranks.run(runs, 2, cases)[0]):
        assert difference(reference["weights"], result["weights"]) < 1e-6, f"stage {stage}"
        assert losses(result) == pytest.approx(losses(reference), rel=1e-5)


def test_a_run_learns_and_its_seed_decides_it(ranks, reference):
    again, other, unmixed, start = ranks.run(
        runs,
        1,
        [
            SMALL,
            small(run={"seed": 4}),
            small(data={"classification": {"mixup": 0, "cutmix": 0}}),
            small(optimizer={"params": {"lr": 0.0}}),
        ],
    )[0]
    assert difference(reference["weights"], again["weights"]) == 0
    assert difference(reference["weights"], other["weights"]) > 1e-2
    assert difference(reference["weights"], start["weights"]) > 1e-3
    # The same images and start, so it is the mixing that makes the difference.
    assert difference(reference["weights"], unmixed["weights"]) > 1e-4
    assert losses(start) == pytest.approx([np.log(6)] * 3, rel=0.2)


def test_bf16_follows_fp32_loosely(ranks, reference):
    result = ranks.run(runs, 2, [small(bf16={"enabled": True}, zero_optimization={"stage": 2})])[0][0]
    assert losses(result) == pytest.approx(losses(reference), rel=0.03)
    assert distance(reference["weights"], result["weights"]) < 0.01


def classifier(name="convnext_atto", options=SMALL["detector"]["options"], **settings):
    from engine.modeling.classifier import build_classifier

    return build_classifier(
        DetectorConfig(config=f"timm::{name}", options=options),
        CLASSES,
        ClassificationConfig(image_size=32, **settings),
    )


def mixed(model, count, seed):
    """Image k has the value 10 k everywhere and class k, so that its share in a mixture can be read from either."""
    np.random.seed(seed)
    images = (10.0 * torch.arange(count)).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).clone()
    return model.mixed(images, torch.arange(count))


@pytest.mark.parametrize(
    "settings",
    [{"mixup": 0.8, "cutmix": 0.0}, {"mixup": 0.0, "cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}],
    ids=["mixup", "cutmix", "both"],
)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_image_of_a_micro_batch_is_mixed_with_another_and_its_target_alike(count, settings):
    model = classifier(**settings, label_smoothing=0.0)
    shares = set()
    for seed in range(8):
        images, targets = mixed(model, count, seed)
        assert len(images) == len(targets) == count
        torch.testing.assert_close(
            images.mean((1, 2, 3)), targets[:, :count] @ (10.0 * torch.arange(count)), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(targets.sum(1), torch.ones(count))
        own = targets.diagonal()
        assert (own == 1).all() if count == 1 else torch.allclose(own, own[:1].expand(count))
        shares.add(round(float(own[0]), 4))
        again, same = mixed(model, count, seed)
        assert torch.equal(images, again) and torch.equal(targets, same)
    assert len(shares) > 4 or count == 1


def test_an_even_micro_batch_is_mixed_as_timm_does_it():
    from timm.data import Mixup

    model = classifier(label_smoothing=0.2)
    for seed in range(4):
        images, targets = mixed(model, 4, seed)
        np.random.seed(seed)
        plain = (10.0 * torch.arange(4)).view(-1, 1, 1, 1).expand(-1, 3, 32, 32).clone()
        expected = Mixup(0.8, 1.0, label_smoothing=0.2, num_classes=8)(plain, torch.arange(4))
        assert torch.equal(images, expected[0]) and torch.equal(targets, expected[1])


def test_the_loss_is_cross_entropy_with_smoothed_targets():
    from engine.data.classification import LabelledSample

    torch.manual_seed(0)
    images, samples = torch.randn(3, 3, 32, 32), [LabelledSample(img_id=k, label=2 * k) for k in range(3)]
    labels = torch.tensor([0, 2, 4])
    model = classifier(mixup=0.0, cutmix=0.0, label_smoothing=0.3)
    expected = torch.nn.functional.cross_entropy(model.backbone(images), labels, label_smoothing=0.3)
    torch.testing.assert_close(model.loss(images, samples)["loss"], expected)
    mixing = classifier(mixup=0.5, cutmix=0.0, label_smoothing=0.3)
    mixing.load_state_dict(model.state_dict())
    np.random.seed(5)
    mixture, targets = mixing.mixed(images.clone(), labels)
    expected = torch.nn.functional.cross_entropy(model.backbone(mixture), targets)
    np.random.seed(5)
    torch.testing.assert_close(mixing.loss(images.clone(), samples)["loss"], expected)


SCORED = small(
    zero_optimization={"stage": 3},
    data={"shapes": {"val_images": 12}},
    run={"eval_interval": None, "eval_batch_size": 4, "checkpoint_interval": None, "draw": 3},
)


def scored_run():
    """Train and evaluate on this world; then score and run the checkpoint, as the scripts do."""
    import contextlib
    import io

    from engine import distributed
    from engine.inference.evaluate import evaluate
    from engine.inference.infer import infer
    from engine.inference.load import load_model

    result = train_tiny(SCORED, curves=True)
    folder = Path(result["folder"])
    loaded = load_model(str(folder / "checkpoints" / "step-000003"), None, [])
    images = loaded.task.build_split("val", loaded.classes).dataset.listing.folder
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        metrics = evaluate(loaded, "val", folder / "scored")
        infer(loaded, images, folder / "found")
    distributed.barrier()
    return result["folder"], result["metrics"], metrics, images, said.getvalue()


@pytest.fixture(scope="module")
def scored(ranks):
    return ranks.run(scored_run, 2)[0]


def read(path):
    return json.loads(Path(path).read_text())


def own_transform(picture):
    """Evaluation as timm's settings of ConvNeXt have it: 0.875 of the shorter side, bicubic, ImageNet's colours."""
    from torchvision import transforms
    from torchvision.transforms import InterpolationMode

    return transforms.Compose(
        [
            transforms.Resize(36, InterpolationMode.BICUBIC),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )(picture)


@torch.no_grad()
def own_logits(folder, pictures):
    import timm

    tensors, meta = saved_weights(folder)
    model = timm.create_model("convnext_atto", num_classes=6, **SMALL["detector"]["options"]).eval()
    model.load_state_dict({name.removeprefix("backbone."): value for name, value in tensors.items()})
    logits = model(torch.stack([own_transform(picture) for picture in pictures]))
    return logits, meta["dataset_meta"]["classes"]


def test_accuracy_is_that_of_an_independent_computation(scored):
    folder, metrics, again, images, _ = scored
    content = read(Path(images).parent / "annotations" / "instances_val2017.json")
    names = {category["id"]: category["name"] for category in content["categories"]}
    files = {image["id"]: image["file_name"] for image in content["images"]}
    pictures, truths = [], []
    for annotation in (a for a in content["annotations"] if not a["iscrowd"]):
        x, y, w, h = annotation["bbox"]
        picture, side = Image.open(Path(images) / files[annotation["image_id"]]), 1.25 * max(w, h)
        left, top, right, bottom = (
            round(v) for v in (x + w / 2 - side / 2, y + h / 2 - side / 2, x + w / 2 + side / 2, y + h / 2 + side / 2)
        )
        inside = (max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height))
        pictures.append(picture.crop(inside))
        truths.append(names[annotation["category_id"]])
    logits, classes = own_logits(folder, pictures)
    truth = torch.tensor([classes.index(name) for name in truths])
    places = (logits > logits.gather(1, truth[:, None])).sum(1)  # how many classes are surer than the true one
    expected = {f"accuracy_top{k}": float((places < k).float().mean()) for k in (1, 5)}
    expected["loss"] = float(torch.nn.functional.cross_entropy(logits, truth))
    assert 0 < expected["accuracy_top1"] < expected["accuracy_top5"] < 1
    assert metrics == pytest.approx(expected, abs=1e-5)
    assert again == pytest.approx(metrics, abs=1e-5)  # launch/evaluate.py's way
    assert read(Path(folder) / "eval.json") == metrics
    entries = read(Path(folder) / "results.json")
    assert [entry["truth"] for entry in entries] == truths  # every image once, in order
    assert sum(entry["top"][0]["category"] == entry["truth"] for entry in entries) == int((places < 1).sum())


def test_a_scored_run_leaves_records_pictures_and_a_table(scored):
    folder, metrics, _, _, said = scored
    records = [json.loads(line) for line in (Path(folder) / "evaluations.jsonl").read_text().splitlines()]
    assert records == [{"step": 3, **metrics}]
    for name in ("predictions.png", "curves.png", "scored/predictions.png"):
        assert (Path(folder) / name).read_bytes()[:4] == b"\x89PNG"
    assert "accuracy_top1" in said and f"{metrics['accuracy_top1']:.3f}" in said and "by class: disk" in said


def test_curves_show_the_accuracy(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    from engine.monitoring.curves import draw_curves

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "lr": 0.1}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 1, "accuracy_top1": 0.5, "accuracy_top5": 0.75}\n')
    drawn, plot = {}, Axes.plot

    def seen(self, *args, **kwargs):
        drawn[kwargs.get("label")] = args
        return plot(self, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", seen)
    draw_curves(tmp_path)
    assert drawn["accuracy_top1"] == ([1], [0.5]) and drawn["accuracy_top5"] == ([1], [0.75])


def test_inference_tells_the_first_five_classes_of_every_image(scored):
    folder, _, _, images, said = scored
    paths = sorted(Path(images).iterdir())
    logits, classes = own_logits(folder, [Image.open(path) for path in paths])
    entries = read(Path(folder) / "found" / "results.json")
    assert [entry["file_name"] for entry in entries] == [path.name for path in paths]
    for entry, row in zip(entries, logits.softmax(-1)):
        order = row.argsort(descending=True)[:5]
        assert [found["category"] for found in entry["top"]] == [classes[k] for k in order]
        assert [found["score"] for found in entry["top"]] == pytest.approx(row[order].tolist(), abs=1e-5)
        assert f"{entry['file_name']}: {classes[order[0]]} " in said


def paint(path, colour=(200, 30, 30), mode="RGB", size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).convert(mode).save(path)


@pytest.fixture()
def folders(tmp_path):
    """Two classes as ImageNet has them, with what a disk collects beside, and images of other modes."""
    paint(tmp_path / "train" / "n02" / "b.JPEG", mode="L")
    paint(tmp_path / "train" / "n02" / "a.png", (0, 0, 255), mode="RGBA")
    paint(tmp_path / "train" / "n01" / "c.jpg")
    paint(tmp_path / "val" / "n01" / "d.JPEG")
    paint(tmp_path / "val" / "n02" / "e.JPEG", (0, 255, 0))
    (tmp_path / "train" / "n01" / "notes.txt").touch()
    (tmp_path / "train" / "list.csv").touch()
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def in_folders(root, **more):
    splits = {name: {"images": name} for name in ("train", "val")}
    return {"data": {"dataset": "folders", "root": str(root), **splits, **more}}


def test_class_folders_are_read_in_the_order_of_names(folders):
    from engine.tasks.classification import Classification

    task = Classification(config_of(in_folders(folders, classification={"eval_crop": 1.0})))
    train, val, classes = task.build_data()
    assert classes == Classes(("n01", "n02"), (), (1, 2))
    listing = train.dataset.listing
    assert [listing.path(k) for k in range(3)] == [
        str(folders / "train" / name) for name in ("n01/c.jpg", "n02/a.png", "n02/b.JPEG")
    ]
    samples = [train.dataset[k] for k in range(3)]
    assert [sample["data_samples"].label for sample in samples] == [0, 1, 1]
    assert all(sample["inputs"].shape == (3, 32, 32) and sample["inputs"].dtype == torch.float32 for sample in samples)
    green = (torch.tensor([0.0, 1.0, 0.0]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(val.dataset[1]["inputs"].mean((1, 2)), green, rtol=0, atol=0.05)
    # A model that counts its classes otherwise is scored by their names.
    swapped = task.build_split("val", Classes(("n02", "n01"), (), (1, 2)))
    assert swapped.dataset.listing.labels.tolist() == [1, 0] and val.dataset.listing.labels.tolist() == [0, 1]


def test_a_training_image_is_augmented_by_its_key_alone(folders):
    from engine.data.order import SampleKey
    from engine.data.samples import SeededDataset
    from engine.tasks.classification import Classification

    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
    image.save(folders / "train" / "n01" / "c.jpg")
    train, _, _ = Classification(config_of(in_folders(folders))).build_data()
    seeded = SeededDataset(train.dataset, 7)
    first, second = (seeded[SampleKey(0, place, 0)]["inputs"] for place in (0, 1))
    assert torch.equal(first, seeded[SampleKey(0, 0, 0)]["inputs"]) and not torch.equal(first, second)


FAULTS = {
    "no class folders": (
        lambda root: (
            [p.unlink() for p in (root / "val").rglob("*.JPEG")] + [p.rmdir() for p in (root / "val").iterdir()]
        ),
        "val holds no class folders: the images of each class",
    ),
    "an empty class": (lambda root: (root / "train" / "n03").mkdir(), "class folder .*train/n03 holds no image"),
    "a class in training only": (
        lambda root: paint(root / "train" / "n03" / "x.jpg"),
        r'class "n03" is in the training folders but not in the validation ones \(.*val\)',
    ),
    "a class in validation only": (
        lambda root: paint(root / "val" / "n03" / "x.jpg"),
        'class "n03" is in the validation folders but not in the training ones',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_folders_is_told_in_one_sentence(folders, fault):
    from engine.tasks.classification import Classification

    spoil, words = FAULTS[fault]
    spoil(folders)
    with pytest.raises(DataError, match=words) as caught:
        Classification(config_of(in_folders(folders))).build_data()
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="nowhere/train does not exist: check data.root"):
        Classification(config_of(in_folders(folders / "nowhere"))).build_data()


CONFIG_FAULTS = {
    "a detector for classes": (
        {"detector": {"config": "tiny_retinanet", "options": {}}},
        'data.task is "classification" but detector.config "tiny_retinanet" is no classifier',
    ),
    "a classifier for boxes": (
        {"data": {"task": "detection"}},
        'is a classifier but data.task is "detection": set data.task',
    ),
    "folders for boxes": (
        {"data": {"task": "detection", "dataset": "folders"}},
        'data.dataset "folders" has classes and no objects',
    ),
    "a split missing": ({"data": {"dataset": "folders"}}, r'data.train is missing: give \{"images": FOLDER\}, or'),
    "no annotations": (
        {"data": {"dataset": "coco", "train": {"images": "i"}, "val": {"images": "i"}}},
        'the key "data.train.annotations" is missing',
    ),
    "annotations beside folders": (
        {"data": {"dataset": "folders", "train": {"images": "i", "annotations": "a.json"}}},
        'data.train.annotations is not read where data.dataset is "folders": remove it',
    ),
    "mmdet's scale": ({"data": {"scale": [640, 480]}}, "data.scale is for detectors: data.classification says"),
    "crops upside down": ({"data": {"classification": {"crop_scale": [1.0, 0.5]}}}, "the smaller first, got"),
    "whole smoothing": (
        {"data": {"classification": {"label_smoothing": 1.0}}},
        "data.classification.label_smoothing must be below 1.0, got 1.0",
    ),
    "unknown setting": (
        {"data": {"classification": {"mixupp": 1.0}}},
        r'"data.classification.mixupp" \(did you mean "mixup"\?\)',
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_does_not_fit_is_refused_in_one_sentence(fault):
    changes, words = CONFIG_FAULTS[fault]
    with pytest.raises(ConfigError, match=words) as caught:
        config_of(changes)
    assert "\n" not in str(caught.value)


MODEL_FAULTS = {
    "an unknown name": ({"config": "timm::resnet17"}, r'timm has no model "resnet17" \(did you mean "resnet\w+"\?\)'),
    "an unknown tag": ({"config": "timm::resnet18.nobody"}, 'timm has no model "resnet18.nobody"'),
    "an unknown option": ({"options": {"depht": 3}}, r"cannot be built with these options \(.*depht"),
    "a class count": ({"options": {"num_classes": 10}}, "num_classes is settled by the data: remove it"),
    "a download": ({"options": {"pretrained": True}}, "pretrained is settled by detector.load_from: remove it"),
    "zero_init": (
        {"zero_init": True},
        'detector.zero_init: timm\'s "convnext_atto" can be initialised in one piece only',
    ),
    "a frozen slip": (
        {"frozen": ["backbone.stm"]},
        r'no parameter begins with "backbone.stm" \(did you mean "backbone.stem"\?\)',
    ),
    "a fixed size": (
        {"config": "timm::vit_tiny_patch16_224", "options": {}},
        r'built for images of 224x224 pixels but .* is 32: set detector.options \{"img_size": 32\}',
    ),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_model_that_timm_cannot_give_is_refused_in_one_sentence(fault):
    from engine.tasks.classification import Classification

    changes, words = MODEL_FAULTS[fault]
    with pytest.raises(ConfigError, match=words) as caught:
        task = Classification(config_of({"detector": changes}))
        task.build_data()
        task.build_model(CLASSES)
    assert "\n" not in str(caught.value)


def test_an_augmentation_that_timm_does_not_know_is_refused():
    from engine.tasks.classification import Classification

    for text in ("rand-q9", "nothing"):
        config = config_of({"data": {"classification": {"auto_augment": text}}})
        with pytest.raises(ConfigError, match=f'auto_augment "{text}" is not understood by timm'):
            Classification(config).build_data()


def refused(changes):
    try:
        train_tiny(merged(changes, SMALL))
    except UserError as error:
        return str(error)
    return "no error"


def test_a_broken_image_or_folder_is_named_on_every_rank(ranks, folders):
    (folders / "train" / "n02" / "b.JPEG").write_bytes(b"not a picture")
    for answer in ranks.run(refused, 2, in_folders(folders)):
        assert "n02/b.JPEG cannot be loaded" in answer
    (folders / "train" / "n03").mkdir()
    for answer in ranks.run(refused, 2, in_folders(folders)):
        assert "n03 holds no image" in answer
    for answer in ranks.run(refused, 2, {"detector": {"config": "timm::convnext_ato"}}):
        assert 'timm has no model "convnext_ato" (did you mean "convnext_atto"?)' in answer


def test_a_model_built_partitioned_is_initialised(ranks):
    """timm's constructor writes into parameters that zero.Init has cut up: what it wrote must be there all the same."""
    still = {
        "optimizer": {"params": {"lr": 0.0}},
        "schedule": {"steps": 1},
        "zero_optimization": {"stage": 3},
        "detector": {"config": "timm::resnet10t", "options": {}, "zero_init": True},
    }
    weights = ranks.run(runs, 2, [merged(still, SMALL)])[0][0]["weights"]
    assert (weights["backbone.layer3.0.bn2.weight"] == 0).all()  # the last norm of a block starts at zero
    conv = weights["backbone.layer3.0.conv2.weight"]  # torch's own start has half of this deviation
    assert float(conv.std()) == pytest.approx((2 / (conv.shape[0] * 9)) ** 0.5, rel=0.05)


def detector(options):
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from engine.modeling.detector import build_detector

    return build_detector(DetectorConfig(config="tiny_retinanet", options=options), CLASSES)


@pytest.mark.parametrize(
    "name,options,moved",
    [
        (
            "resnet10t",
            {
                "backbone": {"type": "TimmBackbone", "_delete_": True, "model_name": "resnet10t"},
                "neck.in_channels": [64, 128, 256, 512],
            },
            "backbone.body.",
        ),
        ("resnet18", {"backbone.base_channels": 64, "neck.in_channels": [64, 128, 256, 512]}, "backbone."),
    ],
)
def test_a_classifier_loads_into_a_detector_of_its_backbone(tmp_path, name, options, moved):
    source = classifier(name, {}).state_dict()
    torch.save({"state_dict": source}, tmp_path / "classifier.pth")
    model = detector(options)
    report = load_weights(model, tmp_path / "classifier.pth", drop_mismatched=False)
    state = model.state_dict()
    assert set(report.matched) == {n for n in state if n.startswith("backbone.")}
    assert all(torch.equal(state[n], source["backbone." + n.removeprefix(moved)]) for n in report.matched)
    assert report.unexpected == [f"{moved}fc.bias", f"{moved}fc.weight"]
    assert set(report.missing) == {n for n in state if not n.startswith("backbone.")}


def test_a_classifier_of_another_backbone_is_refused(tmp_path):
    torch.save({"state_dict": classifier().state_dict()}, tmp_path / "classifier.pth")
    with pytest.raises(WeightsError, match="no tensor that fits this detector"):
        load_weights(detector({}), tmp_path / "classifier.pth", drop_mismatched=True)


def test_weights_of_timm_start_a_classifier(tmp_path):
    import timm

    plain = timm.create_model("convnext_atto", num_classes=8, **SMALL["detector"]["options"])
    torch.save(plain.state_dict(), tmp_path / "timm.pth")
    model = classifier()
    report = load_weights(model, tmp_path / "timm.pth", drop_mismatched=False)
    assert (report.missing, report.unexpected) == ([], [])
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), plain.eval()(images))
