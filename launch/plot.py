"""Draw the gradient variance of every module over one or more runs, and AGVM's factors below it.

One column per run; runs that differ only in their seed share a column. --matched draws runs of different batch sizes
over the same optimizer steps, the same epochs, or both, up to the end of the shortest run.

  python launch/plot.py work_dirs/batch-32 work_dirs/batch-512 --matched step epoch --out variance.png

The runs must use an AGVM optimizer. To see the variances of a plain optimizer, let AGVM measure without modulating:
  --set optimizer.type=AGVMAdamW --set "optimizer.params.clip=[1, 1]"
"""

import argparse
from pathlib import Path

from engine.errors import UserError
from launch.command import parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="work dirs of runs with an AGVM optimizer")
    arguments.add_argument("--out", metavar="FILE", help="picture to write (default: variance.png in the first run)")
    arguments.add_argument(
        "--matched",
        nargs="+",
        choices=("step", "epoch"),
        default=[],
        metavar="AXIS",
        help="step, epoch or both: use the same axis for all runs (default: each run's own steps)",
    )
    arguments.add_argument(
        "--smooth",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="moving average of phi, 0 (none, default) to below 1",
    )
    options = arguments.parse_args()
    run_command(lambda: _plot(options))


def _plot(options: argparse.Namespace) -> None:
    # Here, because --help must not wait for them.
    from engine.monitoring.variance import by_seed, matched_end, read_variances, summary
    from engine.monitoring.variance_picture import draw_variance

    if not 0 <= options.smooth < 1:
        raise UserError(f"--smooth must be at least 0 and below 1, got {options.smooth}")
    runs = [read_variances(Path(run)) for run in options.runs]
    groups = by_seed(runs)
    for axis in options.matched:
        end = matched_end(runs, axis)
        print(
            f"second half of {axis}s 0 to {end:g}, geometric means over windows and seeds\n"
            f"{summary(groups, axis, end)}\n"
        )
    if not options.matched:
        print(f"second half of every run, geometric means over windows and seeds\n{summary(groups)}\n")
    print(
        draw_variance(
            runs, Path(options.out or runs[0].run / "variance.png"), axes=options.matched, smooth=options.smooth
        )
    )


if __name__ == "__main__":
    main()
