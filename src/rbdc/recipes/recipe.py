"""What a training is told: typed settings with timm's names, from YAML files and overrides.

Nothing here needs torch, so that the command line can list every option at once.
"""

import ast
import inspect
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

import yaml

from rbdc.errors import RecipeError, nearest

Interpolation = Literal["bilinear", "bicubic", "random"]


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What happens to an image before the model sees it. Names and meanings are timm's."""

    scale: tuple[float, float] | None = (0.08, 1.0)
    """random resized crop: range of the area; null for a plain crop (crop-padding)"""
    aspect_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """random resized crop: range of the aspect ratio (timm's ratio)"""
    crop_padding: int = 0
    """without scale: pad by this many pixels and crop at random"""
    hflip: float = 0.5
    """probability of a horizontal flip"""
    vflip: float = 0.0
    """probability of a vertical flip"""
    color_jitter: float = 0.4
    """strength of colour jitter; not used together with aa"""
    aa: str | None = None
    """RandAugment and its kin, such as rand-m9-mstd0.5-inc1"""
    train_interpolation: Interpolation = "random"
    """of resized training images"""
    reprob: float = 0.0
    """probability of random erasing"""
    remode: Literal["const", "rand", "pixel"] = "pixel"
    """what erased pixels become"""
    recount: int = 1
    """most rectangles erased in an image"""
    mixup: float = 0.0
    """alpha of mixup; 0 is off"""
    cutmix: float = 0.0
    """alpha of cutmix; 0 is off"""
    mixup_prob: float = 1.0
    """probability that a batch is mixed"""
    mixup_switch_prob: float = 0.5
    """probability of cutmix rather than mixup where both are on"""
    aug_repeats: int = 0
    """repeated augmentation: how often an image occurs in a batch; 0 or 1 is off"""
    crop_pct: float | None = None
    """share of the image that evaluation sees; by default the model's own"""
    mean: tuple[float, ...] | None = None
    """of the pixels, 0 to 1, a channel; by default the model's own"""
    std: tuple[float, ...] | None = None
    """of the pixels, a channel; by default the model's own"""

    @property
    def batched(self) -> bool:
        """Whether whole batches can be augmented at once."""
        return self.scale is None and not self.aa and not self.color_jitter

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True, kw_only=True)
class Recipe(Augmentation):
    """How a model is trained, whatever its width. Names and meanings are timm's."""

    opt: str = "adamw"
    """optimizer, by timm's name"""
    lr: float | None = None
    """peak learning rate; by default lr-base x batch-size / lr-base-size"""
    lr_base: float = 5e-4
    """learning rate at a batch of lr-base-size"""
    lr_base_size: int = 512
    """batch size that lr-base is for"""
    momentum: float = 0.9
    """of SGD and its kin"""
    weight_decay: float = 0.05
    """weight decay"""
    filter_bias_and_bn: bool = True
    """no weight decay on norms, biases, tokens and position embeddings"""
    opt_eps: float | None = None
    """epsilon of the optimizer; by default its own"""
    opt_betas: tuple[float, float] | None = None
    """betas of the optimizer; by default its own"""
    clip_grad: float | None = None
    """clip gradients at this norm (or value: clip-mode)"""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """how gradients are clipped"""
    sched: Literal["cosine", "poly", "step", "tanh"] = "cosine"
    """schedule of the learning rate, stepped every update"""
    warmup_epochs: float = 5.0
    """epochs of linear warm-up"""
    warmup_lr: float = 1e-6
    """learning rate that warm-up starts from"""
    min_lr: float = 1e-5
    """learning rate that the schedule ends at"""
    decay_epochs: float = 30.0
    """sched step: epochs between decays"""
    decay_rate: float = 0.1
    """sched step: factor of a decay"""
    batch_size: int = 256
    """images of an update, over all processes and accumulation steps"""
    grad_accum_steps: int = 1
    """parts a process computes its share of a batch in"""
    smoothing: float = 0.1
    """label smoothing"""
    drop: float = 0.0
    """dropout rate"""
    drop_path: float = 0.0
    """stochastic depth rate"""
    model_ema: bool = False
    """keep a moving average of the weights, and export that"""
    model_ema_decay: float = 0.9998
    """decay of the moving average"""
    model_ema_warmup: bool = False
    """let the decay grow from 0"""
    distillation: Literal["none", "soft", "hard"] = "none"
    """learn from a teacher as well: its distribution, or its decision"""
    teacher: str | None = None
    """teacher: an exported folder, or a timm name with teacher-path"""
    teacher_path: str | None = None
    """weights of a teacher given by name"""
    distillation_alpha: float = 0.5
    """weight of the teacher's part of the loss"""
    distillation_tau: float = 1.0
    """temperature of soft distillation"""
    amp: bool = False
    """mixed precision"""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """type of mixed precision; float16 scales the loss"""
    sync_bn: bool = False
    """batch-norm statistics over all processes (GPU)"""
    eval_epochs: int = 1
    """evaluate every so many epochs, and at the end"""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("batch_size", "grad_accum_steps", "lr_base_size", "eval_epochs", "recount"):
            _check(name, getattr(self, name), at_least=1)
        for name in (
            "hflip",
            "vflip",
            "reprob",
            "mixup_prob",
            "mixup_switch_prob",
            "drop",
            "drop_path",
            "smoothing",
            "distillation_alpha",
            "model_ema_decay",
        ):
            _check(name, getattr(self, name), at_least=0, at_most=1)
        for name in (
            "weight_decay",
            "warmup_epochs",
            "warmup_lr",
            "min_lr",
            "mixup",
            "cutmix",
            "color_jitter",
            "crop_padding",
            "aug_repeats",
        ):
            _check(name, getattr(self, name), at_least=0)
        for name in ("lr", "lr_base", "clip_grad", "decay_epochs", "distillation_tau", "crop_pct"):
            value = getattr(self, name)
            if value is not None:
                _check(name, value, above=0)
        if self.distillation != "none" and self.teacher is None:
            raise RecipeError("distillation needs a teacher", "Give --teacher, or no distillation.")
        if (self.mean is None) != (self.std is None):
            raise RecipeError("of mean and std only one is given", "Give both, or neither.")

    @property
    def learning_rate(self) -> float:
        """The peak learning rate that is really used."""
        return self.lr or self.lr_base * self.batch_size / self.lr_base_size

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """A recipe of settings that may come from a file; an unknown name is an error."""
        check_names(settings, [field.name for field in fields(cls)])
        return cls(**plain_settings(settings))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(
        path.name.removesuffix(".yaml")
        for path in files("rbdc.recipes").iterdir()
        if path.name.endswith(".yaml")
    )


def read_recipe(name: str) -> dict[str, Any]:
    """The settings in a shipped recipe or a YAML file, names with underscores."""
    if name in shipped_recipes():
        text = (files("rbdc.recipes") / f"{name}.yaml").read_text()
    elif Path(name).suffix in (".yaml", ".yml"):
        try:
            text = Path(name).read_text()
        except OSError as error:
            raise RecipeError(f"{name} cannot be read: {error}", "Name a YAML file.") from None
    else:
        known = shipped_recipes()
        raise RecipeError(
            f"no recipe is called {name!r}",
            nearest(name, known) or f"Known are {', '.join(known)}, and YAML files.",
        )
    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is not YAML: {error}", "Mend the file.") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"{name} holds no settings", "Write a line a setting: lr: 0.001")
    return {key.replace("-", "_"): value for key, value in content.items()}


def check_names(settings: Mapping[str, Any], known: list[str]) -> None:
    for name in settings:
        if name not in known:
            raise RecipeError(
                f"no setting is called {name!r}",
                nearest(name, known) or f"Known are {', '.join(known)}.",
            )


def check_types(settings: Any) -> None:
    """Every field of a settings dataclass must be what it is declared to be."""
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(value, hint):
            raise RecipeError(
                f"{name} is {value!r}, expected {describe_type(hint)}",
                "Numbers are written 0.001 or 1.0e-3: YAML reads 1e-3 as text."
                if isinstance(value, str)
                else "Give it such a value.",
            )
        if isinstance(value, float) and not isfinite(value):
            raise RecipeError(f"{name} is {value}", "Give it a finite number.")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        wanted = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(wanted) and all(map(_fits, value, wanted))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe_type(hint: Any) -> str:
    """'a number or nothing', for messages."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(one) for one in inner)
    if origin is tuple:
        return f"a list of {len(inner)} numbers" if inner[1:] != (...,) else "a list of numbers"
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    return "nothing" if hint is type(None) else names.get(hint, str(hint))


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As a dataclass takes them: YAML's lists are tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def _check(
    name: str,
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    if (
        (at_least is not None and value < at_least)
        or (above is not None and value <= above)
        or (at_most is not None and value > at_most)
    ):
        limits = [
            f"{word} {limit:g}"
            for word, limit in (("at least", at_least), ("more than", above), ("at most", at_most))
            if limit is not None
        ]
        raise RecipeError(f"{name} is {value:g}, expected {' and '.join(limits)}", "Change it.")


@cache
def field_help(cls: type) -> dict[str, str]:
    """The text below each field of a settings dataclass, its parents' included."""
    help_: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                help_[field.target.id] = str(text.value.value)
    return help_
