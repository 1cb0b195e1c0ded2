"""The typed form of our blocks. The descriptions say what each field means; docs/config.md is generated from them.

DeepSpeed's keys are not modelled here: they are passed on unchanged (`RunConfig.deepspeed`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from engine.config.optimizer_names import spelled
from engine.config.origin import Origin
from engine.errors import short

# What `--resume` does with a value that differs from the saved one. "free": use the new one; it changes no weight, up
# to rounding. "changes": use the new one and tell the user that results differ from here on. "fixed": refuse it,
# because the optimizer state, the place in the epoch or the meaning of a step would no longer fit.
ResumePolicy = Literal["free", "changes", "fixed"]


def setting(
    default: Any = ..., *, resume: ResumePolicy, description: str, free_keys: tuple[str, ...] = (), **bounds: Any
) -> Any:
    """A field of a block. `resume` also holds for all keys below the field, except `free_keys`."""
    extra: Any = {"resume": resume, "free_keys": free_keys}
    return Field(default, description=description, json_schema_extra=extra, **bounds)


AnyCodeBlock = TypeVar("AnyCodeBlock", bound="CodeBlock")
OptimizerName = Annotated[str, AfterValidator(spelled)]


class Block(BaseModel):
    # strict: "3" is not a number and 1 is not true, so that a mistake in the JSON is reported and not guessed at.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def block_of(annotation: Any) -> type[Block] | None:
    """The block that a field of this type holds, if any."""
    return next((part for part in (annotation, *get_args(annotation)) if hasattr(part, "model_fields")), None)


class CodeBlock(Block):
    """A block that names classes to build. Where it came from is no key: a file cannot call itself trusted.

    A block counts as carried by a file until `from_user` is called on it.
    """

    _origin: Origin = PrivateAttr(Origin.FILE)

    @property
    def origin(self) -> Origin:
        return self._origin

    def from_user(self: AnyCodeBlock) -> AnyCodeBlock:
        block = self.model_copy()
        block._origin = Origin.USER
        return block


class AblationConfig(Block):
    no_fpn: bool = Field(False, description="heads on the backbone's last feature map instead of a pyramid")
    independent_heads: bool = Field(
        False, description="a separate dense head (RetinaNet's head, or the RPN) for every level"
    )
    ignored_pixels: float = Field(0.0, ge=0, lt=1, description="share of pixels left out of the dense head's loss")


class DetectorConfig(CodeBlock):
    config: str = setting(
        resume="fixed",
        description="zoo name, `mmdet::folder/file.py`, path to an mmdet config, or `timm::NAME` (classification)",
    )
    options: dict[str, Any] = setting(
        {},
        resume="fixed",
        description='dotted changes to the mmdet model, e.g. {"backbone.depth": 18}; '
        "of a timm model, arguments of timm.create_model",
    )
    load_from: str | None = setting(
        None, resume="free", description="weights to start from, of a detector or a backbone: .pth or .safetensors"
    )
    drop_mismatched: bool = setting(
        False,
        resume="free",
        description="skip tensors of load_from whose shape differs, such as heads for other classes",
    )
    frozen: list[str] = setting([], resume="fixed", description="prefixes of parameters that are not trained")
    ablation: AblationConfig = setting(
        AblationConfig(), resume="fixed", description="the paper's ablations (docs/recipes.md)"
    )
    sync_bn: bool = setting(False, resume="changes", description="batch-norm statistics over all ranks")
    normaliser: Literal["micro_batch", "ranks"] = setting(
        "micro_batch",
        resume="changes",
        description="what heads divide their losses by: the objects of the micro-batch (the same weights on any number "
        "of ranks), or their mean over the ranks (as mmdet does in FCOS, ATSS, YOLOX, DETRs, ...)",
    )
    checkpoint_activations: list[str] = setting(
        [], resume="free", description="prefixes of modules whose blocks are recomputed in backward"
    )
    tf32: bool = setting(
        True,
        resume="changes",
        description="fp32 products and convolutions round their factors to TF32, as torch recommends for training "
        "(CUDA; no effect on the CPU)",
    )
    channels_last: bool = setting(
        False,
        resume="free",
        description="maps have their channels last in memory, which suits tensor cores in half precision",
    )
    compile_backbone: bool = setting(
        False, resume="free", description="torch.compile of the backbone while training (ZeRO 0 to 2)"
    )
    zero_init: bool = setting(
        False, resume="free", description="build the model partitioned (ZeRO-3; for models that do not fit in memory)"
    )
    skippable: list[str] = setting(
        [],
        resume="free",
        description="prefixes of modules that some ranks may skip in a step; ZeRO-3 keeps them gathered",
    )

    @model_validator(mode="after")
    def _weights_named(self) -> DetectorConfig:
        # An empty variable in a job script: training from scratch instead would not be noticed for days.
        if self.load_from is not None and not self.load_from.strip():
            raise ValueError("detector.load_from is empty: name a weight file, or leave the key out")
        return self


class SplitConfig(Block):
    annotations: str | None = Field(
        None, description="annotation file in COCO form (coco), or folder of PNGs of class numbers (ade20k)"
    )
    images: str = Field(description="image folder (coco, ade20k), or folder of class folders (folders)")
    panoptic: str | None = Field(None, description="folder of panoptic PNGs (panoptic task)")

    @property
    def annotation_path(self) -> str:
        """`annotations`, which every data set has except "folders"."""
        assert self.annotations is not None
        return self.annotations


class ShapesConfig(Block):
    train_images: int = Field(400, ge=1, description="training images")
    val_images: int = Field(100, ge=1, description="validation images")
    image_size: int = Field(160, ge=64, le=2048, description="longer side in pixels")
    max_objects: int = Field(6, ge=1, le=40, description="largest number of objects in an image")
    seed: int = Field(0, ge=0, description="seed of the generator")


class ClassificationConfig(Block):
    image_size: int = Field(224, ge=16, description="side in pixels of the square images that the classifier sees")
    crop_scale: list[float] = Field(
        [0.08, 1.0],
        min_length=2,
        max_length=2,
        description="smallest and largest share of an image's area in a training crop",
    )
    eval_crop: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the shorter side kept in evaluation; default: timm's value for the model, or 0.875",
    )
    color_jitter: float = Field(
        0.4, ge=0, description="change of brightness, contrast and saturation; not used with auto_augment"
    )
    auto_augment: str | None = Field(None, description='timm\'s name of an augmentation, e.g. "rand-m9-mstd0.5"')
    random_erasing: float = Field(0.25, ge=0, le=1, description="probability of Random Erasing, with noise")
    mixup: float = Field(0.8, ge=0, description="alpha of Mixup; 0: none")
    cutmix: float = Field(1.0, ge=0, description="alpha of CutMix; 0: none; with both, a micro-batch uses one of them")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="weight of the uniform distribution in the targets")

    @model_validator(mode="after")
    def _ordered(self) -> ClassificationConfig:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                "data.classification.crop_scale must be two shares above 0 and at most 1, the smaller first, "
                f"got {self.crop_scale}"
            )
        return self


class DataConfig(CodeBlock):
    task: Literal["detection", "instance", "panoptic", "semantic", "classification"] = setting(
        "detection",
        resume="fixed",
        description="boxes; boxes and masks; things and stuff; a class for each pixel; one class for each image",
    )
    dataset: Literal["coco", "ade20k", "shapes", "folders"] = setting(
        "coco",
        resume="fixed",
        description="COCO layout (also Objects365 and COCO-panoptic); ADE20K layout (semantic); the embedded data set; "
        "a folder of images for each class (classification). Classification on coco and shapes crops the objects",
    )
    root: str = setting("", resume="free", description="folder that the paths of train and val are relative to")
    train: SplitConfig | None = setting(None, resume="fixed", description="training split (not for shapes)")
    val: SplitConfig | None = setting(None, resume="free", description="validation split (not for shapes)")
    shapes: ShapesConfig = setting(ShapesConfig(), resume="fixed", description="size of the embedded data set (shapes)")
    classification: ClassificationConfig = setting(
        ClassificationConfig(), resume="changes", description="images and targets of a classifier (classification)"
    )
    scale: list[int] = setting(
        [1333, 800],
        min_length=2,
        max_length=2,
        resume="changes",
        description="longer and shorter side that images are resized to fit",
    )
    train_scales: list[list[int]] | None = setting(
        None, resume="changes", description="two scales to draw from uniformly while training, instead of `scale`"
    )
    flip: float = setting(0.5, ge=0, le=1, resume="changes", description="probability of a horizontal flip")
    augmentation: list[dict[str, Any]] = setting(
        [], resume="changes", description="more mmdet transforms, applied after the flip, as in an mmdet config"
    )
    keep_empty: bool = setting(False, resume="fixed", description="also train on images without objects")
    group_by_aspect: bool = setting(
        False, resume="fixed", description="sort the images of a global batch into micro-batches by orientation"
    )
    workers: int = setting(2, ge=0, le=64, resume="free", description="loader processes for each rank")

    @model_validator(mode="after")
    def _complete(self) -> DataConfig:
        if self.dataset == "folders" and self.task != "classification":
            raise ValueError(
                f'data.dataset "folders" has classes and no objects, but data.task is "{self.task}": '
                'set it to "classification"'
            )
        if (self.task == "semantic") != (self.dataset == "ade20k") and self.dataset != "shapes":
            raise ValueError(
                f'data.task "{self.task}" cannot be trained on data.dataset "{self.dataset}": semantic goes with '
                "ade20k (or shapes), and nothing else does"
            )
        if self.task == "semantic" and (self.group_by_aspect or self.keep_empty):
            raise ValueError(
                f"data.{'group_by_aspect' if self.group_by_aspect else 'keep_empty'} is for data sets that list "
                "sizes and objects, which a semantic one does not: remove it"
            )
        if self.task == "classification":
            odd = [name for name in _DETECTION_ONLY if getattr(self, name) != type(self).model_fields[name].default]
            if odd:
                raise ValueError(
                    f"data.{odd[0]} is for detectors: data.classification says how a classifier sees images"
                )
        for name in ("train", "val") if self.dataset != "shapes" else ():
            split = getattr(self, name)
            if split is None:
                form = {"folders": '{"images": FOLDER}', "ade20k": '{"annotations": FOLDER, "images": FOLDER}'}.get(
                    self.dataset, '{"annotations": FILE, "images": FOLDER}'
                )
                raise ValueError(f'data.{name} is missing: give {form}, or set data.dataset to "shapes"')
            if split.annotations is None and self.dataset in ("coco", "ade20k"):
                raise ValueError(f'the key "data.{name}.annotations" is missing')
            if split.annotations is not None and self.dataset == "folders":
                raise ValueError(f'data.{name}.annotations is not read where data.dataset is "folders": remove it')
        if min(self.scale) < 16:
            raise ValueError(f"data.scale must be two sides of at least 16 pixels, got {self.scale}")
        if self.train_scales is not None and (
            len(self.train_scales) != 2 or any(len(s) != 2 or min(s) < 16 for s in self.train_scales)
        ):
            raise ValueError(f"data.train_scales must be two [longer, shorter] pairs, got {self.train_scales}")
        return self


_DETECTION_ONLY = ("scale", "train_scales", "augmentation", "keep_empty", "group_by_aspect")


class ParamwiseConfig(Block):
    norm_decay: bool = Field(
        True,
        description="weight decay on normalisation layers, other one-dimensional scales, and Swin's position tables",
    )
    bias_decay: bool = Field(True, description="weight decay on biases")
    lr_mult: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description='learning-rate factor by prefix, e.g. {"backbone": 0.1}'
    )
    layer_decay: float | None = Field(
        None, gt=0, le=1, description="learning-rate factor per backbone layer, counted from the head down"
    )


class SamConfig(Block):
    rho: float = Field(
        0.05, gt=0, le=1e6, description="distance from the weights (L2 norm) at which the gradient is taken"
    )


class OptimizerConfig(Block):
    type: OptimizerName = setting(
        resume="fixed", description="AdamW, SGD, ... (any of torch.optim) or one of ours (docs/optimizers.md)"
    )
    params: dict[str, Any] = setting(
        {}, resume="changes", free_keys=("bucket_size",), description="the optimizer's arguments, as in torch"
    )
    paramwise: ParamwiseConfig = setting(
        ParamwiseConfig(), resume="changes", description="different settings for some parameters"
    )
    sam: SamConfig | None = setting(
        None, resume="changes", description="sharpness-aware minimisation with this optimizer; doubles the computation"
    )


class ScheduleConfig(Block):
    epochs: float | None = setting(
        None, gt=0, resume="changes", description="length of the run in epochs (or give `steps`)"
    )
    steps: int | None = setting(
        None, ge=1, resume="changes", description="length of the run in optimizer steps (or give `epochs`)"
    )
    warmup_steps: int | None = setting(None, ge=0, resume="changes", description="warm-up length in optimizer steps")
    warmup_epochs: float | None = setting(None, ge=0, resume="changes", description="warm-up length in epochs")
    warmup: Literal["linear", "exponential"] = setting("linear", resume="changes", description="shape of the warm-up")
    warmup_start: float = setting(0.001, gt=0, le=1, resume="changes", description="factor at the first step")
    decay: Literal["multistep", "poly", "cosine", "constant"] = setting(
        "multistep", resume="changes", description="shape after warm-up"
    )
    milestones: list[float] = setting(
        [0.75, 0.917],
        resume="changes",
        description="multistep: drops, in epochs (> 1) or as fractions of the run (< 1)",
    )
    gamma: float = setting(0.1, gt=0, le=1, resume="changes", description="multistep: factor at a milestone")
    power: float = setting(0.9, gt=0, resume="changes", description="poly: exponent")
    min_factor: float = setting(0.0, ge=0, le=1, resume="changes", description="poly and cosine: factor at the end")

    @model_validator(mode="after")
    def _one_length(self) -> ScheduleConfig:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("schedule needs exactly one of epochs and steps")
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("schedule takes one of warmup_steps and warmup_epochs, not both")
        if min(self.milestones, default=0) < 0:
            raise ValueError(f"schedule.milestones must be at least 0, got {self.milestones}")
        return self


class RunSettings(Block):
    seed: int = setting(0, ge=0, resume="fixed", description="seed of all random numbers")
    work_dir: str | None = setting(None, resume="free", description="output folder; default work_dirs/<name>-<time>")
    eval_interval: float | None = setting(
        None, ge=0, resume="free", description="epochs between evaluations; 0: never, null (default): only at the end"
    )
    eval_backend: Literal["pycocotools", "faster-coco-eval", "auto"] = setting(
        "pycocotools",
        resume="free",
        description="library that computes AP; `auto`: faster-coco-eval where it is installed",
    )
    eval_batch_size: int = setting(1, ge=1, resume="free", description="batch size of evaluation on each rank")
    checkpoint_interval: float | None = setting(
        1.0,
        ge=0,
        resume="free",
        description="epochs between checkpoints (also fractions), and one at the end; 0: never, null: only at the end",
    )
    keep_last: int = setting(2, ge=1, resume="free", description="how many of the newest checkpoints are kept")
    keep_best: str | None = setting(
        "auto",
        resume="free",
        description="metric whose best checkpoint is also kept; auto: the first metric, null: none",
    )
    timeout_minutes: float = setting(
        30.0,
        gt=0,
        le=100_000,
        resume="free",
        description="how long ranks wait for each other before the run fails; rank 0's scoring must fit into it",
    )
    on_save_error: Literal["stop", "continue"] = setting(
        "stop", resume="free", description="what to do if a file cannot be written, for example on a full disk"
    )
    ema: float | None = setting(
        None,
        gt=0,
        lt=1,
        resume="changes",
        description="decay of the moving average of the weights (EMA), kept on the fp32 shards, e.g. 0.9998",
    )
    log_interval: int = setting(
        10, ge=1, resume="free", description="optimizer steps between log lines, if the output is not a terminal"
    )
    max_nonfinite: int = setting(
        3, ge=1, resume="free", description="stop after this many optimizer steps in a row with a non-finite loss"
    )
    draw: int = setting(6, ge=0, le=64, resume="free", description="number of validation images drawn at the end")


class RunConfig(Block):
    name: str = setting("run", resume="free", description="part of the default work dir; for a file, its own name")
    recipe: str | None = setting(None, resume="fixed", description="a run of the paper (docs/recipes.md)")
    detector: DetectorConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    run: RunSettings = RunSettings()
    deepspeed: dict[str, Any]

    @model_validator(mode="after")
    def _model_fits_task(self) -> RunConfig:
        if not self.name or len(self.name) > 100 or self.name.startswith(".") or set(self.name) & set("/\\\n"):
            raise ValueError(f'name must be a plain file name of at most 100 letters, got "{short(self.name)}"')
        classifier = self.detector.config.startswith("timm::")
        if classifier and self.data.task != "classification":
            raise ValueError(
                f'detector.config "{self.detector.config}" is a classifier but data.task is '
                f'"{self.data.task}": set data.task to "classification"'
            )
        if classifier and self.detector.ablation != AblationConfig():
            raise ValueError(
                f'detector.ablation is for detectors, and "{self.detector.config}" is a classifier: remove it'
            )
        if self.data.task == "classification" and not classifier:
            raise ValueError(
                f'data.task is "classification" but detector.config "{self.detector.config}" is no '
                'classifier: give one of timm, such as "timm::resnet18"'
            )
        return self

    def from_user(self) -> RunConfig:
        """This config as one that the user wrote: it may name Python files and classes by import path."""
        return self.model_copy(update={"detector": self.detector.from_user(), "data": self.data.from_user()})

    @property
    def zero_stage(self) -> int:
        return self.deepspeed.get("zero_optimization", {}).get("stage", 0)

    def to_json(self) -> dict[str, Any]:
        """The content of a file that repeats this run: DeepSpeed's keys first, then our blocks."""
        recipe = {"recipe": self.recipe} if self.recipe is not None else {}
        blocks = self.model_dump(exclude={"deepspeed", "name", "recipe"})
        return {"name": self.name, **recipe, **self.deepspeed, **blocks}
