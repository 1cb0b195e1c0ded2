"""Time and memory of saving, exporting, converting and resuming for a large model of the zoo.

  python benchmarks/checkpoint_cost.py --model swin_b --stage 2            # about 100 M parameters
  python benchmarks/checkpoint_cost.py --model uninet_g_htcx --stage 3     # 1.1 B: 14 GB on disk, twice

Two ranks on this machine. There is no training: moments are filled with random numbers, so that a checkpoint has its
real size. New processes save, resume on two ranks and on one, export, convert, and resume from the universal folder.
Peak memory is the resident memory of a rank above what it held before, without memory-mapped files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

MODELS = {
    "swin_b": {
        "config": "mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py",
        "options": {
            "backbone.embed_dims": 128,
            "backbone.depths": [2, 2, 18, 2],
            "backbone.num_heads": [4, 8, 16, 32],
            "neck.in_channels": [128, 256, 512, 1024],
        },
    },
    "uninet_g_htcx": {"config": "uninet_g_htcx", "zero_init": True},
}


def settings(model: str, stage: int, work_dir: str) -> dict[str, Any]:
    bf16 = {"enabled": True}
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        **({"bf16": bf16} if stage else {}),
        "detector": {**MODELS[model], **({} if stage == 3 else {"zero_init": False})},
        "data": {"task": "instance", "dataset": "shapes", "shapes": {"train_images": 8, "val_images": 2}, "workers": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "schedule": {"steps": 9},
        "run": {"work_dir": work_dir, "eval_interval": 0},
    }


def anonymous_gb() -> float:
    """Resident memory without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 2**20
    return 0.0


@contextlib.contextmanager
def measured(result: dict[str, float], name: str) -> Iterator[None]:
    before, peak, stop = anonymous_gb(), [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], anonymous_gb())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    try:
        yield
    finally:
        result[f"{name} s"] = round(time.monotonic() - began, 2)
        stop.set()
        thread.join()
        result[f"{name} GB"] = round(max(0.0, peak[0] - before), 2)


def save_once(model: str, stage: int, work_dir: str) -> dict[str, float]:
    import torch

    from engine.checkpoints.saving import save_checkpoint
    from engine.recipes.load import parse_config
    from engine.train.build import build_run

    run = build_run(parse_config(settings(model, stage, work_dir)))
    for shard in run.layout.shards().values():
        run.optimizer.state[shard] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(shard),
            "exp_avg_sq": torch.zeros_like(shard),
        }
        for value in list(run.optimizer.state[shard].values())[1:]:
            value.normal_()
    result: dict[str, float] = {"parameters M": round(sum(run.layout.geometry.numels) / 1e6, 1)}
    with measured(result, "save"):
        save_checkpoint(run.state(), run.work_dir, 1)
    folder = Path(work_dir) / "checkpoints" / "step-000001"
    result["disk GB"] = round(sum(path.stat().st_size for path in folder.iterdir()) / 2**30, 2)
    return result


def resume_once(model: str, stage: int, work_dir: str, source: str) -> dict[str, float]:
    from engine.recipes.load import parse_config
    from engine.train import build as building
    from engine.train.work_dir import Resume

    result: dict[str, float] = {}
    go_on, open_dir = building.resume_from, building.open_work_dir

    def timed(run, checkpoint):
        with measured(result, "restore"):
            go_on(run, checkpoint)

    def checked(*args):
        with measured(result, "check"):
            return open_dir(*args)

    building.resume_from, building.open_work_dir = timed, checked
    run = building.build_run(parse_config(settings(model, stage, work_dir)), Resume(source))
    assert run.start == 1
    return result


def in_ranks(world: int, function: str, *args: Any) -> dict[str, float]:
    """Run a function on new processes; the largest numbers of all ranks."""
    store, out = tempfile.mktemp(prefix="gigadet-store-"), tempfile.mkdtemp(prefix="gigadet-cost-")
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
                import torch

                from engine.zero.processes import init_distributed

                torch.set_num_threads(1)
                with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                    init_distributed(init_method=f"file://{store}", rank=rank, world_size=world)
                    result = globals()[function](*args)
                Path(out, f"{rank}.json").write_text(json.dumps(result))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise SystemExit(f"{function} failed")
    results = [json.loads(path.read_text()) for path in Path(out).iterdir()]
    return {key: max(result[key] for result in results) for key in results[0]}


def export_once(source: str, out: str, universal: bool) -> dict[str, float]:
    from engine.inference.export import export_universal, export_weights

    result: dict[str, float] = {}
    with measured(result, "universal" if universal else "export"), contextlib.redirect_stderr(open(os.devnull, "w")):
        export_universal(source, Path(out)) if universal else export_weights(source, Path(out))
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", choices=MODELS, default="swin_b")
    arguments.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2)
    arguments.add_argument(
        "--folder", default=tempfile.gettempdir(), help="where checkpoints are written, and removed again"
    )
    options = arguments.parse_args()
    from engine.zero.processes import import_deepspeed

    import_deepspeed()
    import engine.train.build  # noqa: F401
    from engine.data.shapes import ShapesSettings, write_shapes
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    write_shapes(ShapesSettings(train_images=8, val_images=2))
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gigadet-cost-") as folder:
        run = f"{folder}/run"
        print("saved, 2 ranks       ", in_ranks(2, "save_once", options.model, options.stage, run), flush=True)
        print(
            "resumed, 2 ranks     ",
            in_ranks(2, "resume_once", options.model, options.stage, f"{folder}/two", run),
            flush=True,
        )
        print(
            "resumed, 1 rank      ",
            in_ranks(1, "resume_once", options.model, options.stage, f"{folder}/one", run),
            flush=True,
        )
        print("exported             ", in_ranks(1, "export_once", run, f"{folder}/model.pth", False), flush=True)
        print("universal            ", in_ranks(1, "export_once", run, f"{folder}/universal", True), flush=True)
        print(
            "resumed, universal, 2",
            in_ranks(2, "resume_once", options.model, options.stage, f"{folder}/three", f"{folder}/universal"),
            flush=True,
        )


if __name__ == "__main__":
    main()
