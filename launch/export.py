"""Convert a checkpoint, of any ZeRO stage and number of ranks, to one weight file or to DeepSpeed's universal format.

For a detector an mmdet config is written too (here detector.py), for mmdet's init_detector.

  python launch/export.py work_dirs/RUN detector.pth              # the newest complete checkpoint
  python launch/export.py work_dirs/RUN/checkpoints/best detector.safetensors --dtype bfloat16
  python launch/export.py work_dirs/RUN/checkpoints/step-000384 averaged.pth --ema
  python launch/export.py work_dirs/RUN universal/ --universal    # zero/NAME/{fp32,exp_avg,...}.pt
"""

import argparse
from pathlib import Path

from launch.command import add_trust_argument, origin_of, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "checkpoint", help="a work dir (its newest checkpoint), one of its checkpoints, or a universal folder"
    )
    arguments.add_argument("out", help="file to write, .pth or .safetensors; with --universal a folder")
    arguments.add_argument("--ema", action="store_true", help="the averaged weights (run.ema) instead of the last ones")
    arguments.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="type of the weights (default float32); buffers keep theirs",
    )
    arguments.add_argument(
        "--universal",
        action="store_true",
        help="write the complete training state in DeepSpeed's universal format, parameter by parameter",
    )
    add_trust_argument(arguments)
    options = arguments.parse_args()
    run_command(lambda: _export(options))


def _export(options: argparse.Namespace) -> None:
    # Here, because --help must not wait for torch.
    from engine.inference.export import export_universal, export_weights
    from engine.zero.processes import import_deepspeed

    import_deepspeed()
    if options.universal:
        export_universal(options.checkpoint, Path(options.out))
        return
    written = export_weights(
        options.checkpoint, Path(options.out), ema=options.ema, dtype=options.dtype, origin=origin_of(options)
    )
    print(f"written {', '.join(str(path) for path in written)}", flush=True)


if __name__ == "__main__":
    main()
