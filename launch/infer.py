"""Run a checkpoint on images.

Draws the images, and writes a COCO results file, maps, or the five best classes of each image.

  python launch/infer.py work_dirs/RUN/checkpoints/step-000384 photo.jpg
  python launch/infer.py FILE folder/ --out found --score 0.5
  python launch/infer.py FILE "folder/**/*.jpg"

Exit codes: 0 done; 2 an error that the message explains; 3 done, but the images that the messages name could not be
read.
"""

import argparse
import sys
from pathlib import Path

from launch.command import LEFT_OUT, add_model_arguments, leave, load_model, parser, run_command


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
    # Here, because --help must not wait for torch.
    from engine import distributed
    from engine.inference.infer import infer

    reasons = infer(load_model(options), options.source, Path(options.out), threshold=options.score)
    if distributed.rank() == 0:
        for reason in reasons:
            print(f"left out: {reason}", file=sys.stderr, flush=True)
    if reasons:
        distributed.barrier()  # a launcher ends all ranks when one exits: the messages come first
        leave(LEFT_OUT)


if __name__ == "__main__":
    main()
