"""Start-up time and memory of a rank with the annotations of a large data set, before and after they became arrays.

    python benchmarks/annotation_memory.py --boxes 25000000 --parsed 1000000

before   every rank parsed the file and kept mmdet's pickled dictionaries (and, of validation, Python's)
parses   the first rank of a node: parses, cleans, writes arrays, maps them
maps     every other rank of the node: maps the arrays

Seconds are those of the processor. The first two need Python's dictionaries of all boxes while they parse: they are
measured with `--parsed` boxes and multiplied. The third is measured with arrays of all `--boxes`. Each is a process of
its own.
"""

import argparse
import multiprocessing
import os
import pickle
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.data.annotation_file import read_annotations
from engine.data.annotation_table import AnnotationTable, pack_json, pack_objects, pack_texts
from engine.data.cleaning import clean
from engine.data.node_share import _map, _write

PER_IMAGE = 15
GB = 2**30


def write_json_file(path: Path, boxes: int) -> None:
    """Fifteen boxes an image and 365 categories, as in Objects365."""
    noise = np.random.default_rng(0)
    with path.open("w") as file:
        images = (
            f'{{"id":{k},"file_name":"images/v1/patch{k % 50}/objects365_v1_{k:08d}.jpg","width":640,"height":480}}'
            for k in range(boxes // PER_IMAGE)
        )
        names = (f'{{"id":{k},"name":"class {k}"}}' for k in range(365))
        file.write(f'{{"images":[{",".join(images)}],"categories":[{",".join(names)}],"annotations":[')
        for start in range(0, boxes, 1_000_000):
            count = min(1_000_000, boxes - start)
            numbers = np.concatenate([noise.uniform(0, 300, (count, 2)), noise.uniform(2, 170, (count, 2))], 1).tolist()
            rows = (
                f'{{"id":{start + k + 1},"image_id":{(start + k) // PER_IMAGE},"category_id":{(start + k) % 365},'
                f'"bbox":[{x:.3f},{y:.3f},{w:.3f},{h:.3f}],"area":{w * h:.3f},"iscrowd":0}}'
                for k, (x, y, w, h) in enumerate(numbers)
            )
            file.write(("," if start else "") + ",".join(rows))
        file.write("]}")


def made_arrays(boxes: int) -> dict[str, np.ndarray]:
    """The arrays that such a file becomes."""
    images, noise = boxes // PER_IMAGE, np.random.default_rng(0)
    name, name_ends = pack_texts(f"images/v1/patch{k % 50}/objects365_v1_{k:08d}.jpg" for k in range(images))
    return dict(
        id=np.arange(images),
        height=np.full(images, 480, np.int32),
        width=np.full(images, 640, np.int32),
        name=name,
        name_ends=name_ends,
        categories=pack_json([{"id": k, "name": f"class {k}"} for k in range(365)]),
        category=(np.arange(images * PER_IMAGE) % 365).astype(np.int32),
        box=noise.uniform(2, 170, (images * PER_IMAGE, 4)),
        area=np.full(images * PER_IMAGE, 99.0),
        crowd=np.zeros(images * PER_IMAGE, np.bool_),
        ignore=np.zeros(images * PER_IMAGE, np.bool_),
        ends=np.arange(images + 1) * PER_IMAGE,
    )


def own_memory() -> int:
    """Bytes of this process that no other process shares through a file: Python's objects and arrays in its heap."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def before(path: str) -> None:
    content, _ = clean(read_annotations(path), path, masks=False, training=True)
    by_image: dict = {}
    for annotation in content["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    before.kept = [  # what mmengine keeps: every image's dictionary, pickled
        pickle.dumps(
            dict(
                img_path=image["file_name"],
                img_id=image["id"],
                height=image["height"],
                width=image["width"],
                instances=[
                    dict(ignore_flag=0, bbox=a["bbox"], bbox_label=a["category_id"]) for a in by_image[image["id"]]
                ],
            ),
            protocol=4,
        )
        for image in content["images"]
    ]


def parses(path: str) -> None:
    content, _ = clean(read_annotations(path), path, masks=False, training=True)
    arrays = pack_objects(content, masks=False)
    del content
    folder = _write(arrays, path)
    del arrays
    parses.kept = AnnotationTable(_map(folder, path))


def maps(folder: str) -> None:
    maps.kept = AnnotationTable(_map(Path(folder), folder))
    for row in range(0, len(maps.kept), max(1, len(maps.kept) // 10_000)):  # as a loader does
        maps.kept.objects(row)


def _measured(function, argument, answer) -> None:
    start, began = own_memory(), time.process_time()
    function(argument)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    answer.put((seconds, peak - start, own_memory() - start))


def measured(function, argument) -> tuple[float, float, float]:
    """Seconds, peak of memory and memory kept, in a process of its own."""
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_measured, args=(function, argument, answer))
    process.start()
    found = answer.get()
    process.join()
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--boxes", type=int, default=25_000_000)
    arguments.add_argument("--parsed", type=int, default=1_000_000)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        path = Path(folder) / "annotations.json"
        began = time.process_time()
        write_json_file(path, options.parsed)
        print(f"{path.stat().st_size / GB:.2f} GiB written in {time.process_time() - began:.1f} s")
        factor = options.boxes / options.parsed
        print(f"{options.boxes:,} boxes; the first two times {factor:g}, from {options.parsed:,} boxes")
        print(f"{'':8}{'seconds':>10}{'peak GiB':>10}{'kept GiB':>10}")
        for function in (before, parses):
            row = [value * factor for value in measured(function, str(path))]
            print(f"{function.__name__:8}{row[0]:10.1f}{row[1] / GB:10.2f}{row[2] / GB:10.2f}", flush=True)
        arrays = made_arrays(options.boxes)
        total = sum(array.nbytes for array in arrays.values())
        shared = _write(arrays, "arrays")
        del arrays
        row = list(measured(maps, str(shared)))
        print(f"{'maps':8}{row[0]:10.2f}{'':10}{row[2] / GB:10.2f}   and {total / GB:.2f} GiB shared by the node")


if __name__ == "__main__":
    main()
