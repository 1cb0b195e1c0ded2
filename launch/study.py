"""Compare optimizers as the batch grows: methods x batch sizes x seeds on one pipeline and data set.

  python launch/study.py                                    the default study on drawn shapes: a few hours of two cores
  python launch/study.py --study miniature                  a few minutes
  python launch/study.py --study my.json --methods SGD AGVM+SGD --out work_dirs/mine

Every method gets the same epochs and the same tuning: a sweep of learning rates around the paper's rule with the first
seed, then the best one with all seeds. The same command continues a study that was stopped. The report consists of
results.md, results.csv, scores.png, variance-*.png and study.html (everything in one file). --report writes it from the
runs that are finished, also while a study is running. The shipped studies are in ds_configs/studies.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from engine.errors import UserError
from launch.command import parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--study", default="shapes", metavar="FILE", help="a study's JSON, or a shipped one's name (default: shapes)"
    )
    arguments.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods of the study")
    arguments.add_argument("--batches", nargs="+", type=int, metavar="N", help="other batch sizes")
    arguments.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="other seeds; the first is used for tuning"
    )
    arguments.add_argument("--out", metavar="DIR", help="output folder (default: work_dirs/study-NAME)")
    arguments.add_argument(
        "--at-once", type=int, metavar="N", help="number of parallel runs (default: one per core, at most 8)"
    )
    arguments.add_argument("--report", action="store_true", help="only write the report of the finished runs")
    options = arguments.parse_args()
    run_command(lambda: _study(options))


def _study(options: argparse.Namespace) -> None:
    # Here, because --help must not wait for torch.
    from engine.study.grid import check_runs, keep_settings, load_study
    from engine.study.report import write_report
    from engine.study.runner import read_outcomes, run_study

    given = {name: value for name, value in (("batches", options.batches), ("seeds", options.seeds)) if value}
    study, rows = load_study(options.study, given, options.methods)
    at_once = options.at_once if options.at_once is not None else min(8, os.cpu_count() or 1)
    if at_once < 1:
        raise UserError(f"--at-once must be at least 1, got {at_once}")
    folder = Path(options.out or Path("work_dirs") / f"study-{Path(options.study).stem}")
    if options.report and not (folder / "study.json").is_file():
        raise UserError(f"{folder} holds no study to report on: give the --out that it was run with")
    check_runs(study, rows)
    keep_settings(study, folder)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that it also ends the running trials
    if options.report:
        outcomes = read_outcomes(study, rows, folder)
    else:
        outcomes = run_study(study, rows, folder, at_once=at_once, say=lambda line: print(line, flush=True))
    print(write_report(study, rows, outcomes, folder))
    print(f"written to {folder}: study.html, results.md, results.csv, scores.png, variance-*.png")
    failed = {trial: outcome.error for trial, outcome in outcomes.items() if outcome.error}
    if failed:
        trial, error = next(iter(failed.items()))
        raise UserError(
            f"{len(failed)} of {len(outcomes)} runs failed, the first of them {trial.name} with {error}: the same "
            "command tries them again"
        )


if __name__ == "__main__":
    main()
