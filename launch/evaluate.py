"""Score a checkpoint on a data set with its task's metric (COCO AP, PQ, mIoU or accuracy), on any number of ranks.

  python launch/evaluate.py work_dirs/RUN/checkpoints/step-000384
  deepspeed --num_accelerators 2 launch/evaluate.py FILE --split train
  python launch/evaluate.py detector.pth --deepspeed_config ds_configs/bccd_retinanet_r18.json \\
      --set data.val.annotations=test.json
  python launch/evaluate.py FILE --tta 1600x1200 1600x1000
"""

import argparse
from pathlib import Path

from launch.command import add_model_arguments, load_model, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    add_model_arguments(arguments)
    arguments.add_argument(
        "--split", choices=("val", "train"), default="val", help="which split to score (default val)"
    )
    arguments.add_argument(
        "--out",
        metavar="DIR",
        help="folder for eval.json and results (default: eval/ in the work dir, or beside the file)",
    )
    arguments.add_argument(
        "--tta",
        nargs="*",
        metavar="SCALE",
        help="test-time augmentation: predict every image at these scales, plain and mirrored, "
        "e.g. --tta 1600x1200 1600x1000 (default: data.scale); boxes only",
    )
    options = arguments.parse_args()
    run_command(lambda: _evaluate(options))


def _evaluate(options: argparse.Namespace) -> None:
    from engine.inference.evaluate import evaluate, output_folder  # here: --help must not wait for torch

    out = Path(options.out or output_folder(options.checkpoint))
    evaluate(load_model(options), options.split, out, tta=options.tta)


if __name__ == "__main__":
    main()
