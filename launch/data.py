"""Look at a data set before it is trained on (docs/data.md).

  python launch/data.py check --deepspeed_config my.json
  python launch/data.py check --deepspeed_config my.json --set data.root=../mine --all
  python launch/data.py check annotations.json images/ --task instance

check reads every object, every image's size and every map, prints what a run would leave out and what it would stop
for. Exit codes: 0 all is well; 2 a run would stop, or an error that the message explains; 3 a run would start, but
leave out the objects that are listed.
"""

import argparse

from launch.command import LEFT_OUT, USER_ERROR, add_config_arguments, leave, parser, run_command

SHOWN = 10  # faults of a split, without --all
TASKS = ("detection", "instance", "panoptic", "semantic", "classification")


def main() -> None:
    arguments = parser(__doc__)
    commands = arguments.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="what a run would leave out, and what it would stop for")
    add_config_arguments(check, required=False)
    check.add_argument("annotations", nargs="?", help="an annotation file in COCO form, or a folder of class maps")
    check.add_argument("images", nargs="?", help="the image folder of the annotations")
    check.add_argument("--task", choices=TASKS, default="detection", help="what the two paths are for (detection)")
    check.add_argument("--panoptic", metavar="DIR", help="the folder of PNGs, for --task panoptic")
    check.add_argument("--all", action="store_true", help=f"list every fault, not only the first {SHOWN} of a split")
    options = arguments.parse_args()
    if (options.deepspeed_config is None) == (options.images is None):
        check.error("give either --deepspeed_config, or an annotation file and its image folder")
    run_command(lambda: leave(check_code(options)))


def check_code(options: argparse.Namespace) -> int:
    """Print what is found in the data; the exit code."""
    # Here, because --help must not wait for them.
    from engine.config.schema import DataConfig, SplitConfig
    from engine.data.check import check_data
    from engine.recipes.load import load_config

    if options.deepspeed_config is not None:
        checks = check_data(load_config(options.deepspeed_config, options.set).data)
    else:
        files = SplitConfig(annotations=options.annotations, images=options.images, panoptic=options.panoptic)
        data = DataConfig(
            task=options.task, dataset="ade20k" if options.task == "semantic" else "coco", train=files, val=files
        )
        checks = check_data(data, ["train"])
    for found in checks:
        print(f"{found.name}: {found.source}")
        for line in found.facts:
            print(f"  {line}")
        for line in found.left_out:
            print(f"  left out: {line}")
        shown = found.refusals if options.all else found.refusals[:SHOWN]
        for line in shown:
            print(f"  would stop: {line}")
        if len(shown) < len(found.refusals):
            print(f"  would stop: {len(found.refusals) - len(shown):,} more such faults (--all lists them)")
    refused = sum(len(found.refusals) for found in checks)
    if refused:
        print(f"verdict a run would stop: {refused:,} faults", flush=True)
        return USER_ERROR
    if any(found.left_out for found in checks):
        print("verdict a run would start, and leave out what is listed", flush=True)
        return LEFT_OUT
    print("verdict all is well", flush=True)
    return 0


if __name__ == "__main__":
    main()
