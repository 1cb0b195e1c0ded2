"""How long a large annotation file takes: JSON alone, the checks of reading, and the cleaning of its objects.

python benchmarks/annotation_check.py --boxes 1000000
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from engine.data.annotation_file import read_annotations
from engine.data.cleaning import clean


def write(path: Path, boxes: int) -> None:
    """Fifteen boxes an image, as in Objects365; one in a thousand is faulty."""
    noise = np.random.default_rng(0)
    images = max(1, boxes // 15)
    corners, sides = noise.uniform(0, 400, (boxes, 2)).round(2), noise.uniform(1, 200, (boxes, 2)).round(2)
    sides[::1000] *= -1
    with path.open("w") as file:
        listed = [{"id": k, "file_name": f"{k}.jpg", "width": 640, "height": 640} for k in range(images)]
        categories = [{"id": k, "name": f"class {k}"} for k in range(365)]
        file.write(f'{{"images": {json.dumps(listed)}, "categories": {json.dumps(categories)}, "annotations": [')
        for k, (corner, side) in enumerate(zip(corners.tolist(), sides.tolist())):
            entry = {"id": k + 1, "image_id": k % images, "category_id": k % 365, "bbox": corner + side, "iscrowd": 0}
            file.write((", " if k else "") + json.dumps({**entry, "area": abs(side[0] * side[1])}))
        file.write("]}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--boxes", type=int, default=1_000_000)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "annotations.json"
        write(path, options.boxes)
        began = time.process_time()
        json.loads(path.read_text())
        parsed = time.process_time() - began
        began = time.process_time()
        content = read_annotations(str(path))
        read = time.process_time() - began
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        _, report = clean(content, str(path), masks=False, training=True)
        cleaned = time.process_time() - began
        more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(f"{options.boxes:,} boxes: JSON {parsed:.2f} s, with checks {read:.2f} s, cleaning {cleaned:.2f} s")
    print(f"peak memory grew by {more:.2f} GB; {report.lines()[0]}")


if __name__ == "__main__":
    main()
