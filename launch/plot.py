"""Draw the gradient variance of every module over a run, and AGVM's factors beneath, one column per run.

  python launch/plot.py work_dirs/batch-32 work_dirs/batch-512 --out variance.png
"""

from launch.command import parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("runs", nargs="+", metavar="RUN", help="work dirs of runs with an AGVM optimizer")
    arguments.add_argument("--out", metavar="FILE", help="picture to write (default: variance.png in the first run)")
    arguments.add_argument("--smooth", type=float, default=0.0, metavar="WEIGHT",
                           help="moving average of phi, 0 (none, default) to below 1")
    options = arguments.parse_args()
    run_command(lambda: _plot(options))


def _plot(options) -> None:
    from pathlib import Path

    from engine.config.errors import UserError
    from engine.monitoring.variance import draw_variance

    if not 0 <= options.smooth < 1:
        raise UserError(f"--smooth must be at least 0 and below 1, got {options.smooth}")
    runs = [Path(run) for run in options.runs]
    print(draw_variance(runs, Path(options.out or runs[0] / "variance.png"), smooth=options.smooth))


if __name__ == "__main__":
    main()
