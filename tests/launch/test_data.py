"""launch/data.py as a user calls it, and runs on faulty data from the first line to the score."""

import json
import re
from pathlib import Path

import pytest
from annotation_mutants import OBJECT_FAULTS, Draft, sound_content, write_images
from forking import Script
from tiny_run import merged, train_tiny

LAUNCH = Path(__file__).parents[2] / "launch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    (path / "images").mkdir()
    write_images(path / "images")
    return path


def check(folder, *arguments):
    script = Script(LAUNCH / "data.py", "check", *arguments, folder=folder)
    code = script.wait()
    assert "Traceback" not in script.stderr, script.stderr
    return code, script.stdout, script.stderr


def test_check_tells_what_a_run_would_leave_out_and_what_it_would_stop_for(folder):
    content = sound_content()
    (folder / "sound.json").write_text(json.dumps(content))
    code, out, err = check(folder, "sound.json", "images", "--task", "instance")
    assert (code, out.splitlines()[-1]) == (0, "verdict all is well")
    assert "8 images, 3 classes, 21 boxes, 21 of them used (2 crowds)" in out and "ETA" in err

    content["annotations"][0]["category_id"] = 999
    (folder / "some.json").write_text(json.dumps(content))
    code, out, _ = check(folder, "some.json", "images")
    assert code == 3 and "  left out: 1 of an unknown category (image 5, annotation 100)" in out

    # Many images, each of another size than the file says, but for those that a run's sample looks at.
    from engine.data.image_files import sample_of

    entry = content["images"][0]
    content["images"][1:] = [
        {**entry, "id": 1000 + k, "width": 64 if k + 1 in sample_of(301) else 63} for k in range(300)
    ]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] == 5]
    (folder / "sizes.json").write_text(json.dumps(content))
    code, out, _ = check(folder, "sizes.json", "images")
    assert code == 2 and out.count("5.png has 64 x 48 pixels, but sizes.json says 63 x 48") == 10
    assert "191 more such faults" in out and "verdict a run would stop: 201 faults" in out
    code, out, _ = check(folder, "sizes.json", "images", "--all")
    assert code == 2 and out.count("says 63 x 48") == 201

    code, out, _ = check(folder, "nowhere.json", "images")
    assert code == 2 and "would stop: annotation file nowhere.json does not exist" in out
    code, _, err = check(folder, "sound.json")
    assert code == 2 and "give either --deepspeed_config, or an annotation file and its image folder" in err


def test_check_takes_the_splits_of_a_config(folder):
    content = sound_content()
    (folder / "train.json").write_text(json.dumps(content))
    content["categories"][0]["name"] = "wolf"
    (folder / "val.json").write_text(json.dumps(content))
    splits = {name: {"annotations": f"{name}.json", "images": "images"} for name in ("train", "val")}
    (folder / "run.json").write_text(json.dumps(merged({"data": {"dataset": "coco", **splits}})))
    code, out, _ = check(folder, "--deepspeed_config", "run.json", "--set", f"data.root={folder}")
    assert code == 2 and re.search(r'would stop: class "dog" is in the training annotations but not in the val', out)


@pytest.mark.parametrize("task", ["semantic", "panoptic"])
def test_check_reads_every_map(task, tmp_path):
    from PIL import Image

    from engine.data.shapes import ShapesSettings, write_shapes

    root = write_shapes(ShapesSettings(train_images=10, val_images=5, image_size=96))
    if task == "semantic":
        root = root / "ADEChallengeData2016"
        paths = [root / "annotations" / "validation", root / "images" / "validation"]
        broken = sorted(paths[0].iterdir())[3]
    else:
        paths = [root / "annotations" / "panoptic_val2017.json", root / "val2017"]
        paths += ["--panoptic", root / "annotations" / "panoptic_val2017"]
        broken = sorted((root / "annotations" / "panoptic_val2017").iterdir())[3]
    assert check(tmp_path, *paths, "--task", task)[0] == 0
    whole = broken.read_bytes()
    try:
        with Image.open(broken) as picture:
            cropped = picture.crop((0, 0, 20, 20))
        cropped.save(broken)
        code, out, _ = check(tmp_path, *paths, "--task", task)
    finally:
        broken.write_bytes(whole)
    assert code == 2 and f"{broken} has 20 x 20 pixels, but its image" in out


# Faults of both kinds that need the whole path: reading, training, scoring and drawing.
WHOLE_PATH = {
    "boxes": ["unknown_category", "not_finite", "no_box", "wrong_flag", "id_of_another", "given_twice", "outside"],
    "fields": ["unknown_image", "negative_size", "wrong_area", "null_fields", "odd_id", "ignored", "more_fields"],
}


@pytest.mark.parametrize("name", WHOLE_PATH)
def test_a_run_on_faulty_files_is_the_run_on_the_cleaned_ones(folder, ranks, name):
    """Bit for bit the same weights, and the same scores."""
    import random

    results = []
    for number, split in enumerate(("train", "val")):
        draft = Draft(random.Random(number), split, "detection")
        for fault in WHOLE_PATH[name]:
            OBJECT_FAULTS[fault](draft)
        mutant = draft.finish(name)
        (folder / f"{name} faulty {split}.json").write_text(mutant.text)
        (folder / f"{name} cleaned {split}.json").write_text(json.dumps(mutant.cleaned))
    for kind in ("faulty", "cleaned"):
        splits = {s: {"annotations": f"{name} {kind} {s}.json", "images": "images"} for s in ("train", "val")}
        data = {"dataset": "coco", "root": str(folder), "scale": [64, 64], "train_scales": None, **splits}
        results += ranks.run(train_tiny, 1, {"data": data, "run": {"eval_interval": None, "draw": 2}})
    faulty, cleaned = results
    assert faulty["weights"].keys() == cleaned["weights"].keys()
    assert all((faulty["weights"][key] == cleaned["weights"][key]).all() for key in faulty["weights"])
    assert faulty["metrics"] == cleaned["metrics"] and "bbox_mAP" in faulty["metrics"]
    assert [r["loss"] for r in faulty["records"]] == [r["loss"] for r in cleaned["records"]]
    assert faulty["printed"].count(" left out: ") == 2 and " left out: " not in cleaned["printed"]
