"""Train and evaluate one detector of every mmdet family, and write docs/detectors.md.

  python benchmarks/mmdet_families.py                          # what has no result yet, then the page
  python benchmarks/mmdet_families.py --only dino yolox        # again, whatever the result was
  python benchmarks/mmdet_families.py --again                  # again, all that did not work
  python benchmarks/mmdet_families.py --mode zero3 bf16        # these columns only
  python benchmarks/mmdet_families.py --show dino              # what a run printed

A family is a folder of mmdet's configs. Each trains two steps on the embedded data set at 128 pixels and is evaluated,
through the real loop, in a process forked from one that has imported everything. Results are kept in a JSON file, so
that the script can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

PAGE = ROOT / "docs" / "detectors.md"
STEPS = 2


@dataclass(frozen=True)
class Family:
    config: str
    task: str = "detection"
    options: dict[str, Any] = field(default_factory=dict)


def masks(config: str, **options: Any) -> Family:
    return Family(config, "instance", options)


def thin_hourglass(stages: int = 1) -> dict[str, Any]:
    """Hourglass-104 has 200 million parameters: a short and thin one runs the same heads."""
    return {
        "backbone.num_stacks": stages,
        "backbone.downsample_times": 3,
        "backbone.stage_channels": [256, 256, 256, 256],
        "backbone.stage_blocks": [1, 1, 1, 1],
        "bbox_head.num_feat_levels": stages,
    }


# Fewer regions where an R-CNN would take minutes.
FEW: dict[str, Any] = {
    "train_cfg.rpn_proposal.nms_pre": 200,
    "train_cfg.rpn_proposal.max_per_img": 100,
    "test_cfg.rpn.nms_pre": 200,
    "test_cfg.rpn.max_per_img": 50,
    "test_cfg.rcnn.max_per_img": 10,
}
ONE_STAGE = {**FEW, "train_cfg.rcnn.sampler.num": 64}
THREE_STAGES = {**FEW, **{f"train_cfg.rcnn.{stage}.sampler.num": 64 for stage in range(3)}}

FAMILIES: dict[str, Family] = {
    "albu_example": masks("mask-rcnn_r50_fpn_albu-1x_coco.py"),
    "atss": Family("atss_r18_fpn_8xb8-amp-lsj-200e_coco.py"),
    "autoassign": Family("autoassign_r50-caffe_fpn_1x_coco.py"),
    "boxinst": masks("boxinst_r50_fpn_ms-90k_coco.py"),
    "carafe": Family("faster-rcnn_r50_fpn-carafe_1x_coco.py"),
    "cascade_rcnn": Family("cascade-rcnn_r50_fpn_1x_coco.py"),
    "cascade_rpn": Family("cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py"),
    "centernet": Family("centernet_r18_8xb16-crop512-140e_coco.py"),
    "centripetalnet": Family(
        "centripetalnet_hourglass104_16xb6-crop511-210e-mstest_coco.py", options=thin_hourglass()
    ),
    "cityscapes": Family("faster-rcnn_r50_fpn_1x_cityscapes.py"),
    "condinst": masks("condinst_r50_fpn_ms-poly-90k_coco_instance.py"),
    "conditional_detr": Family("conditional-detr_r50_8xb2-50e_coco.py"),
    "convnext": masks("mask-rcnn_convnext-t-p4-w7_fpn_amp-ms-crop-3x_coco.py"),
    "cornernet": Family("cornernet_hourglass104_8xb6-210e-mstest_coco.py", options=thin_hourglass()),
    "crowddet": Family("crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py"),
    "dab_detr": Family("dab-detr_r50_8xb2-50e_coco.py"),
    "dcn": Family("faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco.py"),
    "dcnv2": Family("faster-rcnn_r50-mdconv-c3-c5_fpn_1x_coco.py"),
    "ddod": Family("ddod_r50_fpn_1x_coco.py"),
    "ddq": Family("ddq-detr-4scale_r50_8xb2-12e_coco.py"),
    "deepfashion": masks("mask-rcnn_r50_fpn_15e_deepfashion.py"),
    "deformable_detr": Family("deformable-detr_r50_16xb2-50e_coco.py"),
    "detectors": Family("detectors_cascade-rcnn_r50_1x_coco.py"),
    "detr": Family("detr_r18_8xb2-500e_coco.py"),
    "dino": Family("dino-4scale_r50_8xb2-12e_coco.py", options={"num_queries": 100}),
    "double_heads": Family("dh-faster-rcnn_r50_fpn_1x_coco.py"),
    "dsdl": Family("coco.py"),
    "dyhead": Family("atss_r50_fpn_dyhead_1x_coco.py"),
    "dynamic_rcnn": Family("dynamic-rcnn_r50_fpn_1x_coco.py"),
    "efficientnet": Family("retinanet_effb3_fpn_8xb4-crop896-1x_coco.py"),
    "empirical_attention": Family("faster-rcnn_r50-attn0010_fpn_1x_coco.py"),
    "fast_rcnn": Family("fast-rcnn_r50_fpn_1x_coco.py"),
    "faster_rcnn": Family("faster-rcnn_r50_fpn_1x_coco.py"),
    "fcos": Family("fcos_r50-caffe_fpn_gn-head_1x_coco.py"),
    "foveabox": Family("fovea_r50_fpn_4xb4-1x_coco.py"),
    "fpg": Family("retinanet_r50_fpg_crop640_50e_coco.py"),
    "free_anchor": Family("freeanchor_r50_fpn_1x_coco.py"),
    "fsaf": Family("fsaf_r50_fpn_1x_coco.py"),
    "gcnet": masks("mask-rcnn_r50-syncbn_fpn_1x_coco.py"),
    "gfl": Family("gfl_r50_fpn_1x_coco.py"),
    "ghm": Family("retinanet_r50_fpn_ghm-1x_coco.py"),
    "glip": Family("glip_atss_swin-t_a_fpn_dyhead_pretrain_obj365.py"),
    "gn": masks("mask-rcnn_r50_fpn_gn-all_2x_coco.py"),
    "gn+ws": Family("faster-rcnn_r50_fpn_gn-ws-all_1x_coco.py"),
    "grid_rcnn": Family("grid-rcnn_r50_fpn_gn-head_1x_coco.py"),
    "groie": Family("faste-rcnn_r50_fpn_groie_1x_coco.py"),
    "grounding_dino": Family("grounding_dino_r50_scratch_8xb2_1x_coco.py"),
    "guided_anchoring": Family("ga-retinanet_r50_fpn_1x_coco.py"),
    "hrnet": Family("fcos_hrnetv2p-w18-gn-head_4xb4-1x_coco.py"),
    "htc": masks("htc_r50_fpn_1x_coco.py", **THREE_STAGES),
    "instaboost": masks("mask-rcnn_r50_fpn_instaboost-4x_coco.py"),
    "lad": Family("lad_r50-paa-r101_fpn_2xb8_coco_1x.py"),
    "ld": Family("ld_r18-gflv1-r101_fpn_1x_coco.py"),
    "legacy_1.x": Family("retinanet_r50_fpn_1x_coco_v1.py"),
    "libra_rcnn": Family("libra-retinanet_r50_fpn_1x_coco.py"),
    "lvis": masks("mask-rcnn_r50_fpn_sample1e-3_ms-1x_lvis-v1.py"),
    "mask2former": masks("mask2former_r50_8xb2-lsj-50e_coco.py"),
    "mask_rcnn": masks("mask-rcnn_r50_fpn_1x_coco.py"),
    "maskformer": Family("maskformer_r50_ms-16xb1-75e_coco.py", "panoptic"),
    "misc": Family("d2_retinanet_r50-caffe_fpn_ms-90k_coco.py"),
    "mm_grounding_dino": Family("grounding_dino_swin-t_pretrain_obj365.py"),
    "ms_rcnn": masks("ms-rcnn_r50_fpn_1x_coco.py"),
    "nas_fcos": Family("nas-fcos_r50-caffe_fpn_fcoshead-gn-head_4xb4-1x_coco.py"),
    "nas_fpn": Family("retinanet_r50_nasfpn_crop640-50e_coco.py"),
    "objects365": Family("retinanet_r50_fpn_1x_objects365v1.py"),
    "openimages": Family("retinanet_r50_fpn_32xb2-1x_openimages.py"),
    "paa": Family("paa_r50_fpn_1x_coco.py"),
    "pafpn": Family("faster-rcnn_r50_pafpn_1x_coco.py"),
    "panoptic_fpn": Family("panoptic-fpn_r50_fpn_1x_coco.py", "panoptic"),
    "pascal_voc": Family("retinanet_r50_fpn_1x_voc0712.py"),
    "pisa": Family("retinanet-r50_fpn_pisa_1x_coco.py"),
    "point_rend": masks("point-rend_r50-caffe_fpn_ms-1x_coco.py"),
    "pvt": Family("retinanet_pvt-t_fpn_1x_coco.py"),
    "queryinst": masks("queryinst_r50_fpn_1x_coco.py"),
    "regnet": Family("retinanet_regnetx-800MF_fpn_1x_coco.py"),
    "reppoints": Family("reppoints-moment_r50_fpn_1x_coco.py"),
    "res2net": Family("faster-rcnn_res2net-101_fpn_2x_coco.py"),
    "resnest": Family("faster-rcnn_s50_fpn_syncbn-backbone+head_ms-range-1x_coco.py"),
    "resnet_strikes_back": Family("retinanet_r50-rsb-pre_fpn_1x_coco.py"),
    "retinanet": Family("retinanet_r18_fpn_1x_coco.py"),
    "rpn": Family("rpn_r50_fpn_1x_coco.py"),
    "rtmdet": Family("rtmdet_tiny_8xb32-300e_coco.py"),
    "sabl": Family("sabl-retinanet_r50_fpn_1x_coco.py"),
    "scnet": masks("scnet_r50_fpn_1x_coco.py", **THREE_STAGES),
    "scratch": Family("faster-rcnn_r50-scratch_fpn_gn-all_6x_coco.py", options=ONE_STAGE),
    "seesaw_loss": masks("mask-rcnn_r50_fpn_seesaw-loss_random-ms-2x_lvis-v1.py"),
    "selfsup_pretrain": masks("mask-rcnn_r50-mocov2-pre_fpn_1x_coco.py", **ONE_STAGE),
    "simple_copy_paste": masks("mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_32xb2-ssj-90k_coco.py", **ONE_STAGE),
    "solo": masks("solo_r50_fpn_1x_coco.py"),
    "solov2": masks("solov2-light_r18_fpn_ms-3x_coco.py"),
    "sort": Family("faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_test-mot17halfval.py", options=ONE_STAGE),
    "sparse_rcnn": Family("sparse-rcnn_r50_fpn_1x_coco.py"),
    "ssd": Family("ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py"),
    "strong_baselines": masks("mask-rcnn_r50_fpn_rpn-2conv_4conv1fc_syncbn-all_lsj-50e_coco.py", **ONE_STAGE),
    "swin": Family("retinanet_swin-t-p4-w7_fpn_1x_coco.py"),
    "timm_example": Family("retinanet_timm-efficientnet-b1_fpn_1x_coco.py"),
    "tood": Family("tood_r50_fpn_1x_coco.py"),
    "tridentnet": Family("tridentnet_r50-caffe_1x_coco.py", options=ONE_STAGE),
    "v3det": Family("fcos_r50_fpn_8x4_sample1e-3_mstrain_v3det_2x.py"),
    "vfnet": Family("vfnet_r50_fpn_1x_coco.py"),
    "wider_face": Family("retinanet_r50_fpn_1x_widerface.py"),
    "yolact": masks("yolact_r50_1xb8-55e_coco.py"),
    "yolo": Family("yolov3_mobilenetv2_8xb24-320-300e_coco.py"),
    "yolof": Family("yolof_r50-c5_8xb8-1x_coco.py"),
    "yolox": Family("yolox_tiny_8xb8-300e_coco.py"),
}  # fmt: skip

# Folders whose models take something else than an image and its objects.
OTHER_DATA = {
    "bytetrack": "videos",
    "clrnet": "lanes",
    "deepsort": "videos",
    "mask2former_vis": "videos",
    "masktrack_rcnn": "videos",
    "ocsort": "videos",
    "qdtrack": "videos",
    "reid": "crops of people",
    "soft_teacher": "images without annotations beside those with",
    "strongsort": "videos",
}
DETRS = ("conditional_detr", "dab_detr", "ddq", "deformable_detr", "detr", "dino")
TWO_RANKS = (
    *DETRS, "atss", "autoassign", "cascade_rcnn", "centernet", "condinst", "faster_rcnn", "fcos", "foveabox", "gfl",
    "htc", "mask2former", "mask_rcnn", "maskformer", "panoptic_fpn", "queryinst", "retinanet", "rtmdet", "solov2",
    "sparse_rcnn", "tood", "vfnet", "yolof", "yolox",
)  # fmt: skip


FPN = {"backbone.depth": 18, "neck.in_channels": [64, 128, 256, 512]}
LAYERS = {"encoder.num_layers": 1, "decoder.num_layers": 2}
THREE_MAPS = {"backbone.depth": 18, "neck.in_channels": [128, 256, 512], **LAYERS}
ONE_MAP = {"backbone.depth": 18, "neck.in_channels": [512], **LAYERS}
# Gathered parameters make ZeRO-3 on two ranks several times slower: there, ResNets have 18 layers and transformers few.
SMALLER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("autoassign", "condinst", "fcos", "foveabox", "gfl", "queryinst", "sparse_rcnn", "tood", "vfnet"), FPN),
    **dict.fromkeys(("faster_rcnn", "mask_rcnn", "panoptic_fpn"), {**FPN, **ONE_STAGE}),
    **dict.fromkeys(("cascade_rcnn", "htc"), {**FPN, **THREE_STAGES}),
    **dict.fromkeys(("ddq", "deformable_detr", "dino"), THREE_MAPS),
    **dict.fromkeys(("conditional_detr", "dab_detr", "detr"), ONE_MAP),
    "mask2former": {
        "backbone.depth": 18,
        "panoptic_head.in_channels": [64, 128, 256, 512],
        "panoptic_head.pixel_decoder.encoder.num_layers": 1,
        "panoptic_head.transformer_decoder.num_layers": 2,
    },
    "maskformer": {
        "backbone.depth": 18,
        "panoptic_head.in_channels": [64, 128, 256, 512],
        "panoptic_head.pixel_decoder.encoder.num_layers": 1,
        "panoptic_head.transformer_decoder.num_layers": 2,
    },
    "yolof": {"backbone.depth": 18, "neck.in_channels": 512},
}  # fmt: skip


@dataclass(frozen=True)
class Mode:
    title: str
    families: tuple[str, ...]
    world: int
    settings: dict[str, Any]
    smaller: bool = False


ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.05}}
AGVM = {"type": "AGVMAdamW", "params": {"lr": 1e-4, "weight_decay": 0.05, "tau": 1, "start_step": 0}}
MODES = {
    "zero2": Mode("ZeRO-2, AdamW", tuple(FAMILIES), 1, {"zero_optimization": {"stage": 2}, "optimizer": ADAMW}),
    "zero3": Mode(
        "ZeRO-3, two ranks, AGVMAdamW",
        TWO_RANKS,
        2,
        {"zero_optimization": {"stage": 3}, "optimizer": AGVM},
        smaller=True,
    ),
    "bf16": Mode(
        "ZeRO-2, bf16, AdamW",
        (*DETRS, "mask2former", "rtmdet", "retinanet"),
        1,
        {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": ADAMW},
    ),
}


def settings(name: str, mode: Mode, work_dir: str) -> dict[str, Any]:
    family = FAMILIES[name]
    options = {**family.options, **(SMALLER.get(name, {}) if mode.smaller else {})}
    return {
        "train_batch_size": 2 * mode.world,
        "train_micro_batch_size_per_gpu": 2,
        "detector": {"config": f"mmdet::{name}/{family.config}", "options": options},
        "data": {
            "task": family.task,
            "dataset": "shapes",
            "shapes": {"train_images": 8, "val_images": 2, "image_size": 128},
            "scale": [128, 128],
            "workers": 0,
        },
        "schedule": {"steps": STEPS, "warmup_steps": 0, "decay": "constant"},
        "run": {"work_dir": work_dir, "checkpoint_interval": 0, "draw": 0},
        **mode.settings,
    }


def train_one(name: str, mode_name: str, rank: int, store: str, log: str, answers: Any) -> None:
    """In a forked process: train and evaluate as one rank, and put what happened on the queue."""
    os.setsid()
    output = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    from engine.errors import UserError, first_line

    mode = MODES[mode_name]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(mode.world), LOCAL_SIZE=str(mode.world))
    answer: dict[str, Any]
    try:
        answer = {
            "verdict": "works",
            "text": "",
            **_train(settings(name, mode, f"{store}-work"), rank, mode.world, store),
        }
    except UserError as error:
        answer = {"verdict": "refused", "text": " ".join(str(error).split())}
    except BaseException as error:
        traceback.print_exc()
        answer = {"verdict": "fails", "text": f"{type(error).__name__}: {first_line(error)}"}
    sys.stdout.flush()
    sys.stderr.flush()
    answers.put((rank, answer))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _train(content: dict[str, Any], rank: int, world: int, store: str) -> dict[str, Any]:
    import torch

    from engine.recipes.load import parse_config
    from engine.train import loop
    from engine.zero.processes import init_distributed

    torch.set_num_threads(1)
    init_distributed(init_method=f"file://{store}", rank=rank, world_size=world)
    loop.finish_report = lambda work_dir: None  # curves of two steps
    built: list[Any] = []
    build = loop.build_run
    loop.build_run = lambda *args: built.append(build(*args)) or built[-1]
    metrics = loop.train(parse_config(content))
    lines = (Path(content["run"]["work_dir"]) / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    if len(losses) != STEPS or not all(0 < loss < float("inf") for loss in losses) or not metrics:
        raise RuntimeError(f"losses {losses}, metrics {metrics}")
    from engine.zero.scalars import whole_shape

    size = sum(whole_shape(p).numel() for p in built[0].engine.module.parameters()) / 1e6
    return {"millions": round(size, 1)}


def measure(name: str, mode_name: str, folder: Path, timeout: float) -> dict[str, Any]:
    """Fork the ranks of one run and wait for their answers."""
    mode, context, began = MODES[mode_name], get_context("fork"), time.monotonic()
    answers: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gigadet-family-") as scratch:
        queue = context.Queue()
        log = str(folder / f"{mode_name}-{name}.log")
        ranks = [
            context.Process(target=train_one, args=(name, mode_name, rank, f"{scratch}/store", log, queue))
            for rank in range(mode.world)
        ]
        for process in ranks:
            process.start()
        deadline = began + timeout
        while len(answers) < mode.world and time.monotonic() < deadline:
            try:
                rank, answers_of = queue.get(timeout=0.5)
                answers[rank] = answers_of
                if answers_of["verdict"] == "fails":  # others may wait for it in a collective
                    deadline = min(deadline, time.monotonic() + 5)
            except Exception:
                if any(process.exitcode not in (None, 0) for process in ranks):
                    break
        for process in ranks:
            process.join(1)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
    order = ("fails", "refused", "works")
    worst = min(answers.values(), key=lambda a: order.index(a["verdict"]), default=None)
    if worst is None or (len(answers) < mode.world and worst["verdict"] != "fails"):
        codes = [process.exitcode for process in ranks]
        worst = {"verdict": "fails", "text": f"no answer after {time.monotonic() - began:.0f} s, exit codes {codes}"}
    return {**worst, "seconds": round(time.monotonic() - began, 1)}


def import_everything() -> None:
    import cv2
    import matplotlib.pyplot  # noqa: F401
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    import engine.tasks.detection
    import engine.tasks.panoptic
    import engine.train.loop  # noqa: F401
    from engine.zero.processes import import_deepspeed, import_late_parts
    from models.mmdet_setup import import_mmdet

    import_mmdet()
    import_deepspeed()
    import_late_parts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="*", choices=MODES, default=list(MODES), help="columns of the table")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, help="run these again")
    parser.add_argument("--again", action="store_true", help="run again what did not work")
    parser.add_argument("--show", choices=FAMILIES, help="print the last output of a family and leave")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run")
    parser.add_argument("--folder", type=Path, default=ROOT / "work_dirs" / "mmdet_families", help="results and logs")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.show:
        for mode in options.mode:
            for log in sorted(options.folder.glob(f"{mode}-{options.show}.log.*")):
                print(f"--- {log}\n{log.read_text()}")
        return
    kept = options.folder / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    import_everything()
    for mode in options.mode:
        for name in MODES[mode].families:
            key = f"{mode} {name}"
            known = results.get(key)
            wanted = (
                name in options.only
                if options.only
                else known is None or (options.again and known["verdict"] != "works")
            )
            if not wanted:
                continue
            result = measure(name, mode, options.folder, options.timeout)
            results = {**(json.loads(kept.read_text()) if kept.exists() else {}), key: result}
            kept.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(f"{mode} {name}: {result['verdict']} ({result['seconds']} s) {result['text']}", flush=True)
    options.page.write_text(page(results))
    print(f"wrote {options.page}")


INTRODUCTION = """# Detectors

What became of one detector of every mmdet family: two optimizer steps of micro-batches of two images on the embedded
data set at 128 pixels, and an evaluation, through the real loop on the CPU, from random weights. Written by
[benchmarks/mmdet_families.py](../benchmarks/mmdet_families.py) with mmdet {mmdet}, torch {torch} and DeepSpeed
{deepspeed}. Seconds are those of a shared machine with two cores: the whole run, without imports.

{counts}

A detector takes its data from the engine's own pipeline (`data`), and not from the mmdet config. What is different
from mmdet, for all of them:

- **Nothing is downloaded.** A run names the weights that its config would have fetched, and warns of layers that are
  frozen and random: give `detector.load_from`, or `"backbone.frozen_stages": -1`. A distilled detector's teacher is
  filled from `detector.options` `{{"teacher_ckpt": FILE}}`.
- **Normalisers belong to the micro-batch.** mmdet's heads with `reduce_mean` (DETRs, FCOS, ATSS, YOLOX, ...) divide
  by the mean number of objects over ranks, so that a gradient depends on which micro-batches run at the same time.
  Here they divide by their own micro-batch's, which gives the same weights on any number of ranks;
  `detector.normaliser: "ranks"` is mmdet's way.
- **Sizes.** Heads and lists of class weights have the classes of the data. Images are padded to the multiple that a
  neck needs. mmdet's resizing or padding of a batch to one fixed size (LSJ configs, CrowdDet) is left out, and YOLOX's
  random size follows from the step.
- **SyncBN** in a config means statistics over all ranks, on CPUs too.
- **The semantic branch** of HTC and SCNet learns from a map drawn from the objects' masks, with one class for the
  background.
- **RPN and CrowdDet** find objects without their classes: they are trained and scored as if there were one class.

"""


def page(results: dict[str, dict[str, Any]]) -> str:
    from importlib.metadata import version

    versions = {name: version(package) for name, package in _PACKAGES.items()}
    titles = [mode.title for mode in MODES.values()]
    lines = ["| family | config | " + " | ".join(titles) + " |", "|" + "---|" * (2 + len(titles))]
    reasons = []
    for name, family in FAMILIES.items():
        cells = []
        for mode_name, mode in MODES.items():
            result = results.get(f"{mode_name} {name}")
            if name not in mode.families:
                cells.append("")
            elif result is None:
                cells.append("not run")
            else:
                cells.append(f"{result['verdict']}, {result['seconds']:.0f} s")
                if result["verdict"] != "works":
                    reasons.append(f"| {name} | {mode.title} | {result['text']} |")
        changed = " (smaller, see below)" if family.options else ""
        lines.append(f"| {name} | {family.config.removesuffix('.py')}{changed} | {' | '.join(cells)} |")
    text = INTRODUCTION.format(counts=_counts(results), **versions) + "\n".join(lines) + "\n\n"
    text += "## What does not work\n\n| family | run | the run's own words |\n|---|---|---|\n" + "\n".join(reasons)
    text += "\n\n## What was made smaller\n\n| family | `detector.options` |\n|---|---|\n"
    text += "\n".join(f"| {name} | `{json.dumps(f.options)}` |" for name, f in FAMILIES.items() if f.options)
    text += "\n" + "\n".join(f"| {name}, on two ranks | `{json.dumps(o)}` |" for name, o in SMALLER.items())
    text += "\n\n## Families of other data\n\nTheir models take something else than an image and its objects:\n\n"
    text += "\n".join(f"- {name}: {what}" for name, what in OTHER_DATA.items())
    return text + "\n"


_PACKAGES = {"mmdet": "onedl-mmdetection", "torch": "torch", "deepspeed": "deepspeed"}


def _counts(results: dict[str, dict[str, Any]]) -> str:
    sentences = []
    for mode_name, mode in MODES.items():
        found = [results.get(f"{mode_name} {name}", {}).get("verdict") for name in mode.families]
        sentences.append(
            f"- {mode.title}: of {len(found)} families **{found.count('works')} work**, {found.count('refused')} are "
            f"refused in one sentence, {found.count('fails')} fail"
            + (f", {found.count(None)} were not run" if None in found else "")
        )
    return "\n".join(sentences)


if __name__ == "__main__":
    main()
