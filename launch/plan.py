"""How much memory a run needs, how long it takes and whether it fits, before it is paid for. No GPU is needed.

  python launch/plan.py --deepspeed_config paper/uninet_g_htcx_agvm_adamw_960 --world-size 480
  python launch/plan.py --deepspeed_config my.json --world-size 64 --gpu h100-80g --out plans/mine
  python launch/plan.py --deepspeed_config my.json --world-size 8 --images 50000 --classes 12 --image-size 1333x800

The model is built as shapes and one real micro-step is traced on them: which tensors are alive when, and every
operation. From this follow the memory of ZeRO 0 to 3 and of offloading, the time of a step and of the run, and the
curve from 8 to 1024 GPUs. The card is described by a few numbers. Change them, or let a measured step set the one
that is not known beforehand, the share of the peak that is reached:

  ... --set-hardware efficiency=0.3 --set-hardware inter_bandwidth=12.5e9
  ... --measured-step 0.42                  a step of this config on this number of GPUs took so many seconds
  ... --calibrate work_dirs/RUN             from the records of a run made on such a card, of any config; --images,
                                            --classes, --image-size and --objects then hold for both

docs/planning.md lists the assumptions, and predictions beside measurements.
"""

import argparse

from launch.command import add_config_arguments, parser, run_command, writable_folder


def main() -> None:
    options = arguments().parse_args()
    run_command(lambda: plan_run(options))


def arguments() -> argparse.ArgumentParser:
    arguments = parser(__doc__)
    add_config_arguments(arguments)
    arguments.add_argument("--world-size", type=int, required=True, metavar="N", help="GPUs in all")
    arguments.add_argument(
        "--gpu",
        default="a100-80g",
        metavar="CARD",
        help='a100-80g (default), a100-40g, h100-80g, v100-32g, cpu-core, or a JSON file with "base" '
        "and the numbers that differ",
    )
    arguments.add_argument(
        "--nodes", type=int, metavar="N", help="machines that hold them (default: the card's usual 8 each)"
    )
    arguments.add_argument(
        "--set-hardware",
        action="append",
        default=[],
        metavar="KEY=NUMBER",
        help="change a number of the card (engine/planning/hardware.py lists them); may be repeated",
    )
    arguments.add_argument(
        "--measured-step", type=float, metavar="SECONDS", help="what a step of this plan took in reality"
    )
    arguments.add_argument("--calibrate", metavar="WORK_DIR", help="a run on such a card, whose steps are used instead")
    arguments.add_argument(
        "--images", type=int, metavar="N", help="training images, where the data is not on this machine"
    )
    arguments.add_argument("--classes", type=int, metavar="N", help="classes, likewise")
    arguments.add_argument(
        "--image-size", metavar="WxH", help="padded size of all images, instead of what the config gives"
    )
    arguments.add_argument(
        "--objects", type=int, default=7, metavar="N", help="objects in an image (default 7, COCO's mean)"
    )
    arguments.add_argument("--out", metavar="DIR", help="write plan.json and scaling.png there")
    return arguments


def plan_run(options: argparse.Namespace) -> None:
    # Imported here so that `--help` is quick.
    from engine.config import solve_batch
    from engine.errors import UserError
    from engine.planning.hardware import find_hardware
    from engine.planning.image_sizes import parse_size
    from engine.recipes.load import load_config

    # First the checks that need no slow import.
    if options.world_size < 1:
        raise UserError(f"--world-size must be a whole number >= 1, got {options.world_size}")
    if options.measured_step is not None and options.calibrate is not None:
        raise UserError("--measured-step and --calibrate both say how fast the card is: give one")
    changes = list(options.set_hardware)
    if options.nodes is not None:
        if options.nodes < 1 or options.world_size % options.nodes:
            raise UserError(f"--nodes must divide --world-size {options.world_size}, got {options.nodes}")
        changes.append(f"gpus_per_node={options.world_size // options.nodes}")
    hardware, size = find_hardware(options.gpu, changes), parse_size(options.image_size)
    config = load_config(options.deepspeed_config, options.set)
    solve_batch(config.deepspeed, options.world_size)
    folder = None if options.out is None else writable_folder(options.out, "--out")

    # The slow imports, after everything that can be told without them.
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    from engine.planning.plan import Plan  # after mmdet is set up
    from engine.planning.report import Report, draw_scaling, header, scaling_points, scaling_table
    from engine.planning.time import calibrate_from_run, calibrated

    given = dict(images=options.images, classes=options.classes, objects=options.objects, fixed_size=size)
    if options.calibrate is not None:
        hardware = calibrate_from_run(options.calibrate, hardware, **given)
    plan = Plan(config, options.world_size, **given)
    if options.measured_step is not None:
        hardware = calibrated(plan, hardware, options.measured_step)
    print(header(plan, hardware), flush=True)
    report = Report(plan, hardware)
    print(f"\n{report.memory_table()}\n{report.recommendation()}\n", flush=True)
    if not report.own.fits:
        print(report.misfit_text(), flush=True)
    print(report.time_text(), flush=True)
    points = scaling_points(plan, hardware)
    print(f"\n{scaling_table(points)}", flush=True)
    if folder is not None:
        from engine.files import write_json  # only where something is written

        try:
            write_json(folder / "plan.json", report.as_json(points), indent=2)
            draw_scaling(points, folder / "scaling.png", f"{config.name} on {hardware.name}")
        except OSError as error:
            raise UserError(f"--out {folder} cannot be written: {error.strerror}") from None
        print(f"\nwritten to {folder}", flush=True)


if __name__ == "__main__":
    main()
