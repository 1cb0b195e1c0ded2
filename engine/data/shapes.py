"""The embedded data set `shapes`, written once in the layouts of COCO, COCO-panoptic and ADE20K.

Names, ids and encodings are those of the real data sets, so that a run on a machine without data uses the same loaders,
filters and metrics as a real run. The folder is written under a temporary name and renamed in one step: a folder with
the final name is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from tqdm import tqdm

from engine.data.panoptic_map import encode_png
from engine.data.shapes_drawing import GENERATOR_VERSION, STUFF, THINGS, Category, Scene, draw_scene

# Class k of the semantic maps is ADE20K_CLASSES[k - 1]: stuff first, because ADE20K sorts classes by area.
ADE20K_CLASSES: tuple[Category, ...] = STUFF + THINGS
_SPLITS = (("train", "training"), ("val", "validation"))
_OUTLINE_SCALE = 4


@dataclass(frozen=True, kw_only=True)
class ShapesSettings:
    """These settings determine every file. `image_size` is the longer side; the shorter is 0.7 to 1 times as long."""

    train_images: int = 400
    val_images: int = 100
    image_size: int = 160
    max_objects: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        # The segments of an image must fit in a uint8 map and in two digits of the annotation ids.
        for name, low, high in (
            ("train_images", 1, 10**6),
            ("val_images", 1, 10**6),
            ("image_size", 64, 2048),
            ("max_objects", 1, 50),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} must be a whole number in {low}..{high}, got {value!r}")

    @property
    def folder_name(self) -> str:
        return (
            f"shapes-{self.train_images}-{self.val_images}-{self.image_size}-{self.max_objects}"
            f"-s{self.seed}-v{GENERATOR_VERSION}"
        )


def write_shapes(settings: ShapesSettings, root: Path | None = None, *, progress: bool = False) -> Path:
    """Write the data set, unless its folder exists already, and return the folder.

    It is in `root`, or else in $GIGADET_CACHE, or else in ~/.cache/gigadet. Any number of processes may call this at
    once: each writes its own copy, the first one to finish keeps it, and the others delete theirs.
    """
    root = Path(root or os.environ.get("GIGADET_CACHE") or "~/.cache/gigadet").expanduser()
    folder = root / settings.folder_name
    if folder.is_dir():
        return folder
    # Not tempfile.mkdtemp: its mode 0700 would survive the rename and lock others out of a shared cache.
    aside = root / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        aside.mkdir(parents=True)
        _write_all(settings, aside, progress=progress)
        _publish(aside, folder)
    except OSError as error:
        raise OSError(
            f"cannot write the shapes data set to {folder} ({error}); "
            "set GIGADET_CACHE to a folder that is writable and has room"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _publish(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        # Renaming to an existing, non-empty folder fails: another process was faster.
        if not folder.is_dir():
            raise


def _write_all(settings: ShapesSettings, folder: Path, *, progress: bool) -> None:
    pixels, images_with = np.zeros(len(ADE20K_CLASSES) + 1, np.int64), []
    counts = (settings.train_images, settings.val_images)
    with tqdm(total=sum(counts), desc="writing shapes", unit="image", disable=not progress) as bar:
        for split, count in enumerate(counts):
            writer = _SplitWriter(settings, folder, split)
            for index in range(count):
                writer.add(index)
                bar.update()
            writer.finish()
            images_with.append(writer.images_with)
            pixels += writer.pixels if split == 0 else 0
    lines = ["Idx\tRatio\tTrain\tVal\tName"]
    for number, category in enumerate(ADE20K_CLASSES, start=1):
        lines.append(
            f"{number}\t{pixels[number] / pixels.sum():.4f}\t{images_with[0][number]}"
            f"\t{images_with[1][number]}\t{category.name}"
        )
    (folder / "ADEChallengeData2016" / "objectInfo150.txt").write_text("\n".join(lines) + "\n")


class _SplitWriter:
    """Writes the scenes of one split in all three layouts."""

    def __init__(self, settings: ShapesSettings, folder: Path, split: int) -> None:
        self.settings, self.split = settings, split
        self.name, ade_name = _SPLITS[split]
        self.annotations = folder / "annotations"
        self.images = folder / f"{self.name}2017"
        self.panoptic = self.annotations / f"panoptic_{self.name}2017"
        self.ade_images = folder / "ADEChallengeData2016" / "images" / ade_name
        self.ade_maps = folder / "ADEChallengeData2016" / "annotations" / ade_name
        for path in (self.images, self.panoptic, self.ade_images, self.ade_maps):
            path.mkdir(parents=True)
        self.image_rows: list[dict] = []
        self.instance_rows: list[dict] = []
        self.panoptic_rows: list[dict] = []
        # For each semantic class (0: void), for ADE20K's table.
        self.pixels = np.zeros(len(ADE20K_CLASSES) + 1, np.int64)
        self.images_with = np.zeros(len(ADE20K_CLASSES) + 1, np.int64)

    def add(self, index: int) -> None:
        settings = self.settings
        scene = draw_scene(
            seed=settings.seed,
            split=self.split,
            index=index,
            image_size=settings.image_size,
            max_objects=settings.max_objects,
        )
        rng = np.random.default_rng([settings.seed, self.split, index, 1])
        # Ids rise with gaps, and are even in train and odd in val, so that no id is in both splits.
        image_id = 14 * (index + 1) + 2 * int(rng.integers(7)) + self.split
        stem = f"{image_id:012d}"
        height, width = scene.labels.shape
        self.image_rows.append({"id": image_id, "file_name": f"{stem}.jpg", "height": height, "width": width})
        # From labels of the scene to panoptic ids and semantic classes; 0 is void in all three.
        panoptic_ids = np.zeros(len(scene.segments) + 1, np.int64)
        classes = np.zeros(len(scene.segments) + 1, np.uint8)
        rows = []
        for label, segment in enumerate(scene.segments, start=1):
            mask = scene.labels == label
            if not mask.any():
                continue
            category, iscrowd = segment.category, int(segment.iscrowd)
            panoptic_ids[label] = _panoptic_id(rng, category, taken=panoptic_ids)
            classes[label] = ADE20K_CLASSES.index(category) + 1
            row = {"category_id": category.id, "iscrowd": iscrowd, "bbox": _box(mask), "area": int(mask.sum())}
            rows.append({"id": int(panoptic_ids[label]), **row})
            if category.isthing:
                # Never 0: for pycocotools that means "no match".
                self.instance_rows.append(
                    {
                        "id": 100 * image_id + label,
                        "image_id": image_id,
                        **row,
                        "segmentation": run_lengths(mask) if iscrowd else polygons(mask),
                    }
                )
        self.panoptic_rows.append({"image_id": image_id, "file_name": f"{stem}.png", "segments_info": rows})
        self._write_images(scene, stem, index, panoptic_ids[scene.labels], classes[scene.labels])

    def _write_images(self, scene: Scene, stem: str, index: int, panoptic: np.ndarray, semantic: np.ndarray) -> None:
        picture = self.images / f"{stem}.jpg"
        Image.fromarray(scene.image).save(picture, quality=92)
        Image.fromarray(encode_png(panoptic)).save(self.panoptic / f"{stem}.png")
        ade_stem = f"ADE_{self.name}_{index + 1:08d}"
        Image.fromarray(semantic).save(self.ade_maps / f"{ade_stem}.png")
        try:
            os.link(picture, self.ade_images / f"{ade_stem}.jpg")
        except OSError:
            # Some file systems have no hard links.
            shutil.copyfile(picture, self.ade_images / f"{ade_stem}.jpg")
        counts = np.bincount(semantic.ravel(), minlength=len(ADE20K_CLASSES) + 1)
        self.pixels += counts
        self.images_with += counts > 0

    def finish(self) -> None:
        """Write the two annotation files."""
        things = [{"id": c.id, "name": c.name, "supercategory": "shape"} for c in THINGS]
        # Things first: mmdet labels classes in this order, and its panoptic heads expect stuff after the things.
        both = [
            {**asdict(c), "isthing": int(c.isthing), "supercategory": "shape" if c.isthing else "texture"}
            for c in THINGS + STUFF
        ]
        for kind, rows, categories in (
            ("instances", self.instance_rows, things),
            ("panoptic", self.panoptic_rows, both),
        ):
            content = {
                "info": {"description": f"{self.settings.folder_name} {self.name}"},
                "licenses": [],
                "images": self.image_rows,
                "annotations": rows,
                "categories": categories,
            }
            (self.annotations / f"{kind}_{self.name}2017.json").write_text(json.dumps(content))


def _panoptic_id(rng: np.random.Generator, category: Category, *, taken: np.ndarray) -> int:
    """A colour near the category's that is not yet used in the image (0, void, counts as used)."""
    value = 0
    while value in taken:
        red, green, blue = np.clip(category.color + rng.integers(-20, 21, 3), 0, 255).tolist()
        value = red + 256 * green + 256 * 256 * blue
    return value


def _box(mask: np.ndarray) -> list[int]:
    """The tight box x, y, width, height."""
    return list(cv2.boundingRect(mask.astype(np.uint8)))


def run_lengths(mask: np.ndarray) -> dict[str, list[int]]:
    """COCO's uncompressed RLE: lengths of runs, column by column, starting with a run of zeros."""
    flat = np.concatenate([[False], mask.ravel(order="F")])
    starts = np.flatnonzero(flat[1:] != flat[:-1])
    return {"counts": np.diff(starts, prepend=0, append=mask.size).tolist(), "size": list(mask.shape)}


def polygons(mask: np.ndarray) -> list[list[float]]:
    """Outlines of the parts of a mask in COCO's coordinates. A part with a hole is split in two at the hole."""
    # Traced on an enlarged mask: OpenCV's contours go through pixel centres, COCO's along pixel borders.
    x, y, width, height = _box(mask)
    crop = np.pad(mask[y : y + height, x : x + width].astype(np.uint8) * 255, 1)
    large = cv2.resize(crop, None, fx=_OUTLINE_SCALE, fy=_OUTLINE_SCALE, interpolation=cv2.INTER_LINEAR)
    contours, tree = cv2.findContours((large > 127).astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    holes = [contour for contour, node in zip(contours, tree[0]) if node[3] >= 0]
    if holes:
        cut = x - 1 + int(holes[0][:, 0, 0].mean()) // _OUTLINE_SCALE
        columns = np.arange(mask.shape[1])
        return polygons(mask & (columns < cut)) + polygons(mask & (columns >= cut))
    # Smoothing moves a line by at most 1/4 pixel, tracing by 1/8: no pixel centre changes sides, so decoding is exact.
    lines = [cv2.approxPolyDP(contour, 0.25 * _OUTLINE_SCALE, closed=True)[:, 0] for contour in contours]
    corners = [(line + 0.5) / _OUTLINE_SCALE + (x - 1, y - 1) for line in lines if len(line) >= 3]
    return [line.ravel().round(2).tolist() for line in corners]
