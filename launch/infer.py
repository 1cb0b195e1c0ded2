"""Run a checkpoint on images: drawn pictures with a COCO results file or maps, or of a classifier the first five classes.

python launch/infer.py work_dirs/RUN/checkpoints/step-000384 photo.jpg
python launch/infer.py FILE folder/ --out found --score 0.5
python launch/infer.py FILE "folder/**/*.jpg"
"""

from launch.command import add_config_arguments, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "checkpoint",
        help="a work dir (its newest checkpoint), one of its checkpoints, a universal "
        "folder, or any .pth / .safetensors of the detector",
    )
    arguments.add_argument("source", help="an image, a folder of images, or a glob in quotes")
    add_config_arguments(arguments, required=False)
    arguments.add_argument("--out", metavar="DIR", default="inference", help="output folder (default: inference)")
    arguments.add_argument(
        "--score", type=float, default=0.3, help="least score of an object to be drawn (default 0.3)"
    )
    arguments.add_argument("--ema", action="store_true", help="the averaged weights of a checkpoint folder (run.ema)")
    options = arguments.parse_args()
    run_command(lambda: _infer(options))


def _infer(options) -> None:
    from pathlib import Path

    from engine import distributed
    from engine.zero.processes import init_distributed

    init_distributed()
    from engine.inference.infer import infer
    from engine.inference.load import load_model

    with distributed.together():
        loaded = load_model(options.checkpoint, options.deepspeed_config, options.set, ema=options.ema)
    infer(loaded, options.source, Path(options.out), threshold=options.score)


if __name__ == "__main__":
    main()
