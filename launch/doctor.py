"""The first command on a new cluster: what is here, how fast the ranks talk, and whether the engine's promises hold.

  python launch/doctor.py
  deepspeed --num_accelerators 2 launch/doctor.py
  deepspeed --hostfile hosts launch/doctor.py --work-dir /shared/runs
  torchrun --nproc-per-node 8 launch/doctor.py
  srun --ntasks-per-node 8 python launch/doctor.py

Start it just as you would start launch/train.py, with a work dir on the disk that runs will use. It prints

  facts    versions, devices, memory, network interface, limits; a `note` where something will hurt later
  checks   PASS, FAIL or SKIP: the same software on all ranks, a work dir that all ranks share, clocks,
           small messages, and a table of all-reduce bandwidth in the terms of nccl-tests
  proofs   on this hardware: mmcv's kernels give what their formulas give, AGVM on ZeRO's shards is its plain twin,
           ZeRO 0, 1, 2 and 3 are alike, a resumed run is the same bit for bit, a small HTC-X trains a step

Each line has the measured number, the number it must not exceed, and its seconds; in all, less than two minutes. A
check that fails or hangs does not keep the doctor from ending. Everything is also in a file to attach to a bug report
(of the environment it holds the settings of NCCL, gloo and the launcher only).

Exit codes: 0 all well; 2 some check failed: the last line names it.
"""

import argparse
from pathlib import Path

from launch.command import leave, parser, run_command, watch_ranks, writable_folder


def main() -> None:
    arguments = doctor_arguments()
    options = arguments.parse_args()
    if options.limit <= 0:
        arguments.error(f"--limit must be more than 0 seconds, got {options.limit:g}")
    run_command(lambda: _examine(options))


def doctor_arguments() -> argparse.ArgumentParser:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--work-dir",
        default="work_dirs",
        metavar="DIR",
        help="folder that runs will write to, shared by all nodes (default work_dirs); only the file stays there",
    )
    arguments.add_argument("--out", metavar="FILE", help="the file to write (default: doctor.json in the work dir)")
    arguments.add_argument("--quick", action="store_true", help="facts and checks only, without the proofs")
    arguments.add_argument(
        "--limit",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a check that takes longer is taken to hang, and the doctor ends (default 120)",
    )
    # Arguments that DeepSpeed's launcher adds.
    arguments.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return arguments


def _examine(options: argparse.Namespace) -> None:
    # Here, because --help must not wait for torch.
    from engine import distributed
    from engine.doctor.examination import Examination
    from engine.doctor.examine import examine
    from engine.errors import UserError
    from engine.zero.processes import import_deepspeed, init_distributed

    work_dir = Path(options.work_dir).absolute()
    out = Path(options.out).absolute() if options.out else work_dir / "doctor.json"
    examination = Examination(out, limit=options.limit, leave=leave)
    examination.meet(init_distributed)
    watch_ranks()
    with distributed.together():
        if distributed.rank() == 0:
            writable_folder(work_dir, "--work-dir")
            writable_folder(out.parent, "the folder of --out")
            if out.is_dir():
                raise UserError(f"--out is the file to write, got the folder {out}")
    import_deepspeed().logger.setLevel("ERROR")  # its notices would stand between the lines
    examine(examination, work_dir, quick=options.quick)


if __name__ == "__main__":
    main()
