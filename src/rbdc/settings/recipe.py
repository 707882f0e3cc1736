"""How a model is trained: augmentation, optimizer, schedule and loss, with timm's names."""

from typing import Literal

from rbdc.errors import RecipeError
from rbdc.settings.duration import Duration, Extent
from rbdc.settings.schema import (
    Amount,
    Count,
    Epochs,
    Pair,
    Positive,
    PositiveShare,
    Settings,
    Several,
    Share,
    Whole,
    settings,
)


@settings
class Augmentation(Settings):
    """How an image is changed before the model sees it. Names and meanings are timm's."""

    scale: Pair[PositiveShare] | None = (0.08, 1.0)
    """random resized crop: smallest and largest share of the image's area; null crops at the
    image's own scale (crop-padding)"""
    aspect_ratio: Pair[Positive] = (3 / 4, 4 / 3)
    """random resized crop: smallest and largest aspect ratio (timm's --ratio)"""
    crop_padding: Whole = 0
    """pixels to pad each side with before a random crop; only used when scale is null"""
    hflip: Share = 0.5
    """probability of a horizontal flip"""
    vflip: Share = 0.0
    """probability of a vertical flip"""
    color_jitter: Amount = 0.4
    """strength of colour jitter; ignored when aa is given"""
    aa: str | None = None
    """AutoAugment policy, such as rand-m9-mstd0.5-inc1; by default none"""
    train_interpolation: Literal["bilinear", "bicubic", "random"] = "random"
    """how training images are resized"""
    decode: Literal["full", "reduced"] = "reduced"
    """decode JPEG training images in full, or at 1/2, 1/4 or 1/8 of their size where the crop has
    enough pixels for the model even so; the latter is faster, and small images are the same"""
    reprob: Share = 0.0
    """probability of random erasing, per image"""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """fill of erased rectangles: zeros, one random colour, or random pixels"""
    recount: Count = 1
    """largest number of rectangles erased per image"""
    mixup: Amount = 0.0
    """mixup alpha; 0 turns mixup off"""
    cutmix: Amount = 0.0
    """cutmix alpha; 0 turns cutmix off"""
    mixup_prob: Share = 1.0
    """probability that mixup or cutmix is applied to a batch"""
    mixup_switch_prob: Share = 0.5
    """probability of cutmix instead of mixup when both are on"""
    aug_repeats: Whole = 0
    """repeated augmentation: copies of each image in a batch; 0 and 1 turn it off"""
    crop_pct: PositiveShare | None = None
    """share of the image's side that the evaluation crop keeps; by default the model's own"""
    test_size: Count | None = None
    """side of the target's test images in pixels; by default that of its training images. Objects
    look larger in random crops than in test images, so somewhat larger ones can score higher
    (FixRes)"""
    mean: Several[float] | None = None
    """pixel mean per channel, for pixels from 0 to 1; by default the model's own"""
    std: Several[Positive] | None = None
    """pixel standard deviation per channel; by default the model's own"""

    @property
    def batched(self) -> bool:
        """Return whether whole batches can be augmented at once."""
        return self.scale is None and not self.aa and not self.color_jitter

    @property
    def mixes(self) -> bool:
        """Return whether mixup or cutmix is on."""
        return self.mixup > 0 or self.cutmix > 0


@settings
class Optimization(Settings):
    """How weights are updated, for every training problem. Names and meanings are timm's."""

    opt: str = "adamw"
    """optimizer, by timm's name"""
    momentum: Share = 0.9
    """momentum of SGD and of optimizers like it"""
    weight_decay: Amount = 0.05
    """weight decay"""
    opt_eps: Amount | None = None
    """optimizer epsilon; by default the optimizer's own"""
    opt_betas: Pair[Share] | None = None
    """optimizer betas; by default the optimizer's own"""
    clip_grad: Positive | None = None
    """clip gradients at this norm, or value (clip-mode); by default they are not clipped"""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """how gradients are clipped"""
    warmup_lr: Amount = 1e-6
    """learning rate at the start of the warm-up"""
    min_lr: Amount = 1e-5
    """learning rate at the end of the schedule"""
    batch_size: Count = 256
    """images per update, over all processes and micro-batches"""
    grad_accum_steps: Count = 1
    """micro-batches per update that each process accumulates gradients over"""
    drop_path: Share = 0.0
    """stochastic depth rate"""
    model_ema: bool = False
    """keep an exponential moving average (EMA) of the weights, and export it"""
    model_ema_decay: Share = 0.9998
    """decay of the EMA weights, per update"""
    model_ema_warmup: bool = False
    """let the EMA decay grow from 0"""
    amp: bool | None = None
    """train in mixed precision; by default on CUDA only"""
    amp_dtype: Literal["bfloat16", "float16"] | None = None
    """data type of mixed precision; by default bfloat16, and float16, which scales the loss, on
    CUDA GPUs without it"""
    sync_bn: bool = False
    """compute batch-norm statistics over all processes; needs GPUs"""
    eval_epochs: Count = 1
    """epochs between evaluations; the last epoch is always evaluated"""

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate that is really used."""
        raise NotImplementedError


@settings
class Recipe(Augmentation, Optimization):
    """How a classifier is trained, whatever its width. Names and meanings are timm's."""

    lr: Positive | None = None
    """peak learning rate; by default lr-base x batch-size / lr-base-size"""
    lr_base: Positive = 5e-4
    """learning rate for a batch of lr-base-size; used when lr is not given"""
    lr_base_size: Count = 512
    """batch size that lr-base is meant for"""
    filter_bias_and_bn: bool = True
    """no weight decay on norms and biases; tokens and position embeddings never have any"""
    sched: Literal["cosine", "linear", "1-sqrt", "poly", "step", "tanh"] = "cosine"
    """learning rate schedule, stepped every update"""
    decay_start: Share = 0.0
    """sched cosine, linear and 1-sqrt: share of the training at which the learning rate begins to
    fall from its peak; 0: right after the warm-up"""
    warmup_epochs: Epochs = 5.0
    """linear warm-up, in epochs or with a unit: '500 steps', '10%'"""
    decay_epochs: Epochs = 30.0
    """sched step: time between decays, in epochs or with a unit: '500 steps', '10%'"""
    decay_rate: Amount = 0.1
    """sched step: factor of each decay; sched poly: its power"""
    smoothing: Share = 0.1
    """label smoothing"""
    drop: Share = 0.0
    """dropout rate"""
    distillation: Literal["none", "soft", "hard"] = "none"
    """also learn from a teacher: from its probabilities (soft) or its decision (hard)"""
    teacher: str | None = None
    """teacher model: an exported folder, or a timm name together with teacher-path"""
    teacher_path: str | None = None
    """weight file of a teacher given by name"""
    distillation_alpha: Share = 0.5
    """weight of the teacher's part of the loss"""
    distillation_tau: Positive = 1.0
    """temperature of soft distillation"""

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        for name in ("scale", "aspect_ratio"):
            if (pair := getattr(self, name)) is not None and pair[0] > pair[1]:
                raise RecipeError(f"{name} is {pair}", "Give the smaller number first.")
        if self.distillation != "none" and self.teacher is None:
            raise RecipeError("distillation needs a teacher", "Give --teacher, or no distillation.")
        if (self.mean is None) != (self.std is None):
            raise RecipeError("of mean and std only one is given", "Give both, or neither.")
        if self.decay_start and self.sched not in ("cosine", "linear", "1-sqrt"):
            raise RecipeError(
                f"sched {self.sched} has no decay-start", "Use sched cosine, linear or 1-sqrt."
            )

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate that is really used."""
        return self.lr or self.lr_base * self.batch_size / self.lr_base_size

    def planned_warmup(self, images: int) -> float:
        """Return the warm-up in epochs, for a plan that is made before trainings have a length.

        A share of a training counts as 0: a plan only warns of a warm-up that is longer than its
        training, and a share never is.
        """
        if not isinstance(self.warmup_epochs, Duration):
            return self.warmup_epochs
        extent = Extent(
            steps_per_epoch=max(1, images // self.batch_size), batch_size=self.batch_size
        )
        return extent.updates(self.warmup_epochs) / extent.steps_per_epoch
