"""Train a detector or a classifier under DeepSpeed from one JSON.

  deepspeed launch/train.py --deepspeed_config ds_configs/quickstart.json
  deepspeed --num_accelerators 2 launch/train.py --deepspeed_config quickstart
  torchrun --nproc-per-node 2 launch/train.py --deepspeed_config quickstart
  srun --ntasks-per-node 8 python launch/train.py --deepspeed_config my.json
  python launch/train.py --deepspeed_config quickstart --set schedule.epochs=1
"""

from launch.command import add_config_arguments, parser, run_command


def main() -> None:
    arguments = parser(__doc__)
    add_config_arguments(arguments)
    arguments.add_argument("--work-dir", metavar="DIR", help="where the run's records go (run.work_dir)")
    arguments.add_argument("--load-from", metavar="FILE", help="weights to start from (detector.load_from)")
    options = arguments.parse_args()
    run_command(lambda: _train(options))


def _train(options) -> None:
    import json

    from engine import distributed
    from engine.config import load_config, solve_batch

    overrides = list(options.set)
    if options.work_dir:
        overrides.append(f"run.work_dir={json.dumps(options.work_dir)}")
    if options.load_from:
        overrides.append(f"detector.load_from={json.dumps(options.load_from)}")
    # Before the slow imports, so that a slip shows at once.
    config = load_config(options.deepspeed_config, overrides)
    solve_batch(config.deepspeed, distributed.world_size())

    from engine.training import train

    distributed.init_distributed()
    train(config)


if __name__ == "__main__":
    main()
