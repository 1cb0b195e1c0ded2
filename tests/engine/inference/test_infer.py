"""launch/infer.py on images that cannot all be read."""

import json
import shutil
from pathlib import Path

import pytest
from forking import Script
from tiny_run import merged

LAUNCH = Path(__file__).parents[3] / "launch"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of an untrained detector."""
    import torch

    from engine.data.types import Classes
    from engine.recipes.load import parse_config
    from engine.tasks.registry import task_of

    config = parse_config(merged({"run": {"eval_batch_size": 3}}))
    classes = Classes(("disk", "star"), (), (1, 2))
    model = task_of(config).build_model(classes)
    path = tmp_path_factory.mktemp("weights") / "tiny.pth"
    meta = {"config": config.to_json(), "dataset_meta": classes.to_meta()}
    torch.save({"state_dict": model.state_dict(), "meta": meta}, path)
    return path


@pytest.fixture
def photos(tmp_path):
    from engine.data.shapes import ShapesSettings, write_shapes

    source = write_shapes(ShapesSettings(train_images=10, val_images=5, image_size=96)) / "val2017"
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, path in enumerate(sorted(source.iterdir())[:3]):
        shutil.copy(path, folder / f"{number}-good.jpg")
    (folder / "1-broken.jpg").write_bytes(b"no picture")
    (folder / "9-empty.png").touch()
    return folder


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_done(weights, photos, tmp_path):
    script = Script(LAUNCH / "infer.py", weights, photos, "--score", "0", folder=tmp_path)
    assert script.wait() == 3, script.stderr
    named = [line for line in script.stderr.splitlines() if line.startswith("left out: ")]
    assert len(named) == 2 and "1-broken.jpg cannot be loaded" in named[0] and "9-empty.png" in named[1]
    assert "Traceback" not in script.stderr
    found = {entry["file_name"] for entry in json.loads((tmp_path / "inference" / "results.json").read_text())}
    assert found == {f"{k}-good.jpg" for k in range(3)}
    assert {path.name for path in (tmp_path / "inference").glob("*.png")} == {f"{k}-good.png" for k in range(3)}
    assert "on 3 images" in script.stdout


def test_where_no_image_can_be_read_it_is_an_error(weights, photos, tmp_path):
    script = Script(LAUNCH / "infer.py", weights, photos / "*-[be][rm]*", folder=tmp_path)
    assert script.wait() == 2
    errors = [line for line in script.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "1-broken.jpg cannot be loaded" in errors[0] and "nor can the other 1" in errors[0]
    assert not list((tmp_path / "inference").glob("*"))


def test_all_images_readable_is_success(weights, photos, tmp_path):
    script = Script(LAUNCH / "infer.py", weights, photos / "*good*", folder=tmp_path)
    assert script.wait() == 0, script.stderr
