"""Score a checkpoint on a data set, by COCO metrics, PQ, mIoU or accuracy as its task has it, on any number of ranks.

  python launch/evaluate.py work_dirs/RUN/checkpoints/step-000384
  deepspeed --num_accelerators 2 launch/evaluate.py FILE --split train
  python launch/evaluate.py detector.pth --deepspeed_config ds_configs/bccd_retinanet_r18.json \\
      --set data.val.annotations=test.json
  python launch/evaluate.py FILE --tta 1600x1200 1600x1000
"""

from launch.command import add_config_arguments, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "checkpoint",
        help="a work dir (its newest checkpoint), one of its checkpoints, a universal "
        "folder, or any .pth / .safetensors of the detector",
    )
    add_config_arguments(arguments, required=False)
    arguments.add_argument(
        "--split", choices=("val", "train"), default="val", help="which split to score (default val)"
    )
    arguments.add_argument(
        "--out",
        metavar="DIR",
        help="where eval.json and results go (default: eval/ in the work dir, or beside the file)",
    )
    arguments.add_argument(
        "--tta",
        nargs="*",
        metavar="SCALE",
        help="test-time augmentation: every image mirrored too, at "
        "these scales, e.g. --tta 1600x1200 1600x1000 (default: data.scale); boxes only",
    )
    arguments.add_argument("--ema", action="store_true", help="the averaged weights of a checkpoint folder (run.ema)")
    options = arguments.parse_args()
    run_command(lambda: _evaluate(options))


def _evaluate(options) -> None:
    from pathlib import Path

    from engine import distributed
    from engine.zero.processes import init_distributed

    init_distributed()
    from engine.inference.evaluate import evaluate, output_folder
    from engine.inference.load import load_model

    with distributed.together():
        loaded = load_model(options.checkpoint, options.deepspeed_config, options.set, ema=options.ema)
    evaluate(loaded, options.split, Path(options.out or output_folder(options.checkpoint)), tta=options.tta)


if __name__ == "__main__":
    main()
