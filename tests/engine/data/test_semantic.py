"""ADE20K's layout as downloaded: 0 is no class, class k is label k - 1, and a broken map is named."""

import shutil

import numpy as np
import pytest
from PIL import Image

from engine.config.schema import DataConfig, SplitConfig
from engine.data.augmentation import VariedCrop
from engine.data.loader import evaluation_loader, readable
from engine.data.semantic import IGNORED, ClassMapImages, read_class_map, read_class_table
from engine.data.shapes import ADE20K_CLASSES, ShapesSettings, write_shapes
from engine.data.types import Classes
from engine.errors import DataError

NAMES = tuple(c.name for c in ADE20K_CLASSES)


@pytest.fixture
def ade(tmp_path):
    """ADEChallengeData2016 of shapes, for spoiling."""
    root = write_shapes(ShapesSettings(train_images=6, val_images=1, image_size=96))
    return shutil.copytree(root / "ADEChallengeData2016", tmp_path / "ADEChallengeData2016")


def split_of(ade):
    return SplitConfig(images=str(ade / "images" / "training"), annotations=str(ade / "annotations" / "training"))


def images_of(ade, *, training=False, **options):
    files = split_of(ade)
    data = DataConfig(task="semantic", dataset="ade20k", train=files, val=files, scale=[96, 96], workers=0, **options)
    return ClassMapImages(data, files, read_class_table(ade / "annotations" / "training"), training=training)


def test_labels_are_the_files_numbers_less_one(ade):
    test, train = images_of(ade), images_of(ade, training=True, flip=0.0)
    assert len(test) == len(train) == 6
    for index in range(6):
        numbers = np.asarray(Image.open(ade / "annotations" / "training" / f"ADE_train_{index + 1:08d}.png")).astype(
            int
        )
        expected = np.where(numbers == 0, IGNORED, numbers - 1)
        sample = test[index]["data_samples"]
        assert (sample.truth == expected).all() and sample.img_id == index + 1
        assert sample.img_path.endswith(f"images/training/ADE_train_{index + 1:08d}.jpg")
        loaded = train[index]["data_samples"]
        if loaded.img_shape == numbers.shape:
            assert (loaded.gt_sem_seg.sem_seg[0].numpy() == expected).all()


def test_flips_and_crops_move_the_map_with_the_image(ade):
    """The image is made of its own labels, so that both must stay alike."""
    for path in (ade / "annotations" / "training").iterdir():
        numbers = np.asarray(Image.open(path))
        picture = ade / "images" / "training" / f"{path.stem}.jpg"
        picture.unlink()
        Image.fromarray(np.repeat(numbers[..., None] * 20, 3, -1)).save(picture.with_suffix(".png"))
    crop = [{"type": "RandomCrop", "crop_size": [40, 50], "crop_type": "absolute", "allow_negative_crop": True}]
    dataset = images_of(ade, training=True, flip=1.0, augmentation=crop)
    for index in range(6):
        item = dataset[index]
        labels = item["data_samples"].gt_sem_seg.sem_seg[0].numpy().astype(int)
        assert labels.shape == (50, 40)  # mmdet writes width first
        image = np.asarray(item["inputs"][0])
        if item["data_samples"].scale_factor == (1.0, 1.0):
            assert (image == np.where(labels == IGNORED, 0, labels + 1) * 20).all()


def test_a_varied_crop_avoids_places_of_one_class():
    labels = np.full((60, 100), 3, np.uint8)
    labels[:, 80:] = np.arange(20) // 5  # only the right end has several classes
    labels[:10] = IGNORED  # and what has none does not count
    image = np.repeat(labels[..., None], 3, -1)
    crop = VariedCrop(size=[30, 30])
    shares = []
    np.random.seed(0)
    for _ in range(60):
        found = crop({"img": image, "gt_seg_map": labels, "img_shape": image.shape[:2]})
        assert found["gt_seg_map"].shape == found["img_shape"] == (30, 30)
        assert (found["img"][..., 0] == found["gt_seg_map"]).all()
        counts = np.bincount(found["gt_seg_map"].ravel(), minlength=256)[:255]
        shares.append(counts.max() / counts.sum())
    assert np.mean(np.array(shares) < 0.75) > 0.6  # a fifth of all places
    small = crop({"img": image[:20, :50], "gt_seg_map": labels[:20, :50], "img_shape": (20, 50)})
    assert small["img_shape"] == (20, 30)


def test_the_crop_is_known_to_a_config(ade):
    dataset = images_of(ade, training=True, augmentation=[{"type": "VariedCrop", "size": [32, 48]}])
    assert all(dataset[k]["data_samples"].gt_sem_seg.sem_seg.shape == (1, 32, 48) for k in range(6))
    assert all(dataset[k]["inputs"].shape == (3, 32, 48) for k in range(6))


def test_classes_are_read_from_the_table_by_their_first_name(ade):
    maps = ade / "annotations" / "training"
    assert read_class_table(maps) == Classes(NAMES, (), tuple(range(1, len(NAMES) + 1)))
    table = ade / "objectInfo150.txt"
    # Blanks behind names and numbers, and synonyms, as the real table has them.
    table.write_text(
        "Idx\tRatio\tTrain\tVal\tName\n1\t0.1576\t11664\t1172\twall\n2 \t0.1072\t6046\t612\tbed \n"
        "3\t0.08\t1\t1\tscreen door, screen\n4\t0.08\t1\t1\tblind, screen\n"
    )
    assert read_class_table(maps).things == ("wall", "bed", "screen door", "blind")
    table.write_text("Idx\tName\n1\tbed, bunk\n2\tbed, flower bed\n")
    assert read_class_table(maps).things == ("bed, bunk", "bed, flower bed")
    table.write_text("Idx\tName\n1\twall\n3\tbed\n")
    with pytest.raises(DataError, match="objectInfo150.txt must have a line for each class"):
        read_class_table(maps)
    table.unlink()
    assert read_class_table(maps).things[:2] == ("class 1", "class 2") and len(read_class_table(maps).things) == 150


def test_a_number_beyond_the_classes_is_told_and_255_is_no_class(tmp_path):
    path = tmp_path / "map.png"
    Image.fromarray(np.array([[0, 1, 4, 255]], np.uint8)).save(path)
    assert read_class_map(str(path), (1, 4), 4, "x.jpg").tolist() == [[IGNORED, 0, 3, IGNORED]]
    with pytest.raises(DataError, match=r"map.png has class 4, but there are classes 1 to 3 \(0 or 255: none\)"):
        read_class_map(str(path), (1, 4), 3, "x.jpg")


def test_a_palette_is_no_colour_picture(tmp_path):
    picture = Image.fromarray(np.array([[0, 2]], np.uint8), mode="P")
    picture.putpalette([9] * 768)
    picture.save(tmp_path / "map.png")
    assert read_class_map(str(tmp_path / "map.png"), (1, 2), 3, "x.jpg").tolist() == [[IGNORED, 1]]


def failure_of(ade):
    with pytest.raises(DataError) as error:
        list(readable(evaluation_loader(images_of(ade), rank=0, world=1, batch=2, workers=0)))
    return str(error.value)


def test_a_broken_map_is_named(ade):
    path = ade / "annotations" / "training" / "ADE_train_00000003.png"
    whole = Image.open(path).copy()
    whole.crop((0, 0, 40, 30)).save(path)
    assert f"class map {path} has 40 x 30 pixels, but its image" in failure_of(ade)
    whole.convert("RGB").save(path)
    assert f"class map {path} is a picture in colours" in failure_of(ade)
    path.write_text("no picture")
    assert f"class map {path} cannot be read" in failure_of(ade)
    Image.fromarray(np.full((whole.height, whole.width), 77, np.uint8)).save(path)
    assert f"class map {path} has class 77" in failure_of(ade)
    path.unlink()
    assert f"class map {path} does not exist, though there is an image" in failure_of(ade)
    shutil.rmtree(path.parent)
    assert f"folder {path.parent} does not exist: check data.root and the split's annotations" in failure_of(ade)
