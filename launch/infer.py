"""Run a checkpoint on images.

Draws the images, and writes a COCO results file, maps, or the five best classes of each image.

  python launch/infer.py work_dirs/RUN/checkpoints/step-000384 photo.jpg
  python launch/infer.py FILE folder/ --out found --score 0.5
  python launch/infer.py FILE "folder/**/*.jpg"
"""

import argparse
from pathlib import Path

from launch.command import add_model_arguments, load_model, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    add_model_arguments(arguments)
    arguments.add_argument("source", help="an image, a folder of images, or a glob in quotes")
    arguments.add_argument("--out", metavar="DIR", default="inference", help="output folder (default: inference)")
    arguments.add_argument(
        "--score", type=float, default=0.3, help="draw objects with at least this score (default 0.3)"
    )
    options = arguments.parse_args()
    run_command(lambda: _infer(options))


def _infer(options: argparse.Namespace) -> None:
    from engine.inference.infer import infer  # here: --help must not wait for torch

    infer(load_model(options), options.source, Path(options.out), threshold=options.score)


if __name__ == "__main__":
    main()
