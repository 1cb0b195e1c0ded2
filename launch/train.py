"""Train a detector or a classifier under DeepSpeed from one JSON.

  deepspeed launch/train.py --deepspeed_config ds_configs/quickstart.json
  deepspeed --num_accelerators 2 launch/train.py --deepspeed_config quickstart
  torchrun --nproc-per-node 2 launch/train.py --deepspeed_config quickstart
  srun --ntasks-per-node 8 python launch/train.py --deepspeed_config my.json
  python launch/train.py --deepspeed_config quickstart --set schedule.epochs=1

Continue a run that was stopped, on any number of ranks (docs/checkpoints.md):

  deepspeed launch/train.py --resume work_dirs/RUN
  deepspeed launch/train.py --resume work_dirs/RUN/checkpoints/step-000384 --work-dir work_dirs/another
  deepspeed launch/train.py --deepspeed_config my.json --work-dir work_dirs/mine --resume

See what a run on many ranks would be, and what would stop it, without them and without a GPU (docs/dry_run.md):

  python launch/train.py --deepspeed_config uninet_g_htcx_coco --dry-run --world-size 480
  python launch/train.py --deepspeed_config uninet_g_htcx_coco --dry-run --world-size 480 --layout shards.json

Exit codes: 0 done; 2 an error that the message explains; 69 another rank is gone, and 75 stopped by a signal or the end
of the launcher, and saved: start again with --resume.
"""

import argparse
import json
import sys

from launch.command import (
    USER_ERROR,
    LastingOutput,
    add_config_arguments,
    add_trust_argument,
    leave,
    origin_of,
    parser,
    run_command,
    watch_ranks,
    writable_folder,
)


def main() -> None:
    arguments = train_arguments()
    options = arguments.parse_args()
    if options.world_size is not None and not options.dry_run:
        arguments.error("--world-size goes with --dry-run: a run has the ranks that its launcher starts")
    if options.layout is not None and not options.dry_run:
        arguments.error("--layout goes with --dry-run: it writes where a run's shards would lie")
    if options.dry_run and options.resume is not None:
        arguments.error("--dry-run is for a new run: leave --resume out")
    if options.deepspeed_config is None and not options.resume:
        arguments.error("--deepspeed_config is required, or --resume with the folder of a run")
    run_command(lambda: leave(dry_run_code(options)) if options.dry_run else _train(options))


def train_arguments() -> argparse.ArgumentParser:
    arguments = parser(__doc__)
    add_config_arguments(arguments, required=False)
    arguments.add_argument("--work-dir", metavar="DIR", help="output folder of the run (run.work_dir)")
    arguments.add_argument("--load-from", metavar="FILE", help="weights to start from (detector.load_from)")
    arguments.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR[/TAG]",
        help="resume from the newest complete checkpoint of the work dir or of DIR, or from DIR/TAG; "
        "with DIR the saved config is used if none is given",
    )
    add_trust_argument(arguments)
    arguments.add_argument(
        "--dry-run",
        action="store_true",
        help="build the run as one rank of many without storage, print it, and say whether it would start",
    )
    arguments.add_argument(
        "--world-size", type=int, metavar="N", help="with --dry-run, the number of ranks; default: the launcher's"
    )
    arguments.add_argument(
        "--layout",
        metavar="FILE",
        help="with --dry-run, write the elements of every module that each rank would hold, as JSON",
    )
    return arguments


def _overrides(options: argparse.Namespace) -> list[str]:
    overrides = list(options.set)
    if options.work_dir:
        overrides.append(f"run.work_dir={json.dumps(options.work_dir)}")
    if options.load_from is not None:
        overrides.append(f"detector.load_from={json.dumps(options.load_from)}")
    return overrides


def dry_run_code(options) -> int:
    """Print the dry run and its verdict; the exit code."""
    # Imported here so that `--help` is quick.
    import os
    from pathlib import Path

    from engine.config import solve_batch
    from engine.errors import ConfigError, UserError
    from engine.recipes.load import load_config

    if os.environ["RANK"] != "0":  # a launcher may have started other ranks
        return 0
    layout = None if options.layout is None else Path(options.layout)
    if layout is not None:
        writable_folder(layout.parent, "the folder of --layout")
        if layout.is_dir():
            raise UserError(f"--layout is the file to write, got the folder {layout}")
    ranks = int(os.environ["WORLD_SIZE"]) if options.world_size is None else options.world_size
    # From here on this process has no other ranks.
    os.environ.update(WORLD_SIZE="1", LOCAL_RANK="0")
    try:
        if ranks < 1:
            raise ConfigError(f"--world-size must be at least 1, got {ranks}")
        config = load_config(options.deepspeed_config, _overrides(options))
        plan = solve_batch(config.deepspeed, ranks)

        from engine.planning.dry_run import dry_run  # slow, so after the config is known to be good

        stops, unknown = dry_run(config, plan, layout)
    except UserError as error:
        stops, unknown = [" ".join(str(error).splitlines())], []
    for reason in (stops + unknown)[1:]:
        print(f"later   {reason}")
    if stops:
        print(f"verdict it would stop: {stops[0]}", flush=True)
    elif unknown:
        print(f"verdict not known: {unknown[0]}", flush=True)
    else:
        print(f"verdict it would run on {ranks} ranks", flush=True)
    return USER_ERROR if stops or unknown else 0


def _train(options: argparse.Namespace) -> None:
    # Here, because --help must not wait for torch.
    from engine import distributed
    from engine.config import solve_batch
    from engine.recipes.load import load_config
    from engine.zero.processes import init_distributed

    sys.stdout, sys.stderr = LastingOutput(sys.stdout), LastingOutput(sys.stderr)
    overrides = _overrides(options)
    # Before the slow imports, so that a mistake is reported at once.
    if options.deepspeed_config is not None:
        config = load_config(options.deepspeed_config, overrides)
        solve_batch(config.deepspeed, distributed.world_size())

    # Here, because a wrong config must not wait for them.
    from engine import preemption
    from engine.train.after_step import Preempted
    from engine.train.loop import train
    from engine.train.work_dir import Resume, saved_config

    init_distributed()
    watch_ranks()
    if options.deepspeed_config is None:
        with distributed.together():
            config = saved_config(options.resume, overrides, origin=origin_of(options))
    resume = None if options.resume is None else Resume(options.resume or None)
    try:
        train(config, resume)
    except Preempted as stop:
        if distributed.rank() == 0:
            print(stop, flush=True)
        leave(preemption.EXIT_CODE if stop.saved else 128 + preemption.NUMBER)


if __name__ == "__main__":
    main()
