"""What a training is told: typed settings with timm's names, from YAML files and overrides.

Nothing here needs torch, so that the command line can list every option at once.
"""

import ast
import inspect
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import inf, isfinite
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from rbdc.errors import RecipeError, nearest

Interpolation = Literal["bilinear", "bicubic", "random"]

_COUNTS = ("lr_base_size", "recount")
_SHARES = (
    "hflip", "vflip", "reprob", "mixup_prob", "mixup_switch_prob", "drop", "smoothing",
    "distillation_alpha",
)  # fmt: skip
_AMOUNTS = (
    "warmup_epochs", "decay_rate", "mixup", "cutmix", "color_jitter", "crop_padding", "aug_repeats",
)  # fmt: skip
_SIZES = ("lr", "lr_base", "decay_epochs", "distillation_tau", "aspect_ratio", "std")


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
class Optimization:
    """How weights are updated, whatever is learned. Names and meanings are timm's."""

    opt: str = "adamw"
    """optimizer, by timm's name"""
    momentum: float = 0.9
    """of SGD and its kin"""
    weight_decay: float = 0.05
    """weight decay"""
    opt_eps: float | None = None
    """epsilon of the optimizer; by default its own"""
    opt_betas: tuple[float, float] | None = None
    """betas of the optimizer; by default its own"""
    clip_grad: float | None = None
    """clip gradients at this norm (or value: clip-mode)"""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """how gradients are clipped"""
    warmup_lr: float = 1e-6
    """learning rate that warm-up starts from"""
    min_lr: float = 1e-5
    """learning rate that the schedule ends at"""
    batch_size: int = 256
    """images of an update, over all processes and accumulation steps"""
    grad_accum_steps: int = 1
    """parts a process computes its share of a batch in"""
    drop_path: float = 0.0
    """stochastic depth rate"""
    model_ema: bool = False
    """keep a moving average of the weights, and export that"""
    model_ema_decay: float = 0.9998
    """decay of the moving average"""
    model_ema_warmup: bool = False
    """let the decay grow from 0"""
    amp: bool = False
    """mixed precision"""
    amp_dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """type of mixed precision; float16 scales the loss"""
    sync_bn: bool = False
    """batch-norm statistics over all processes (GPU)"""
    eval_epochs: int = 1
    """evaluate every so many epochs, and at the end"""

    def __post_init__(self) -> None:
        settle_types(self)
        check_range(self, ("batch_size", "grad_accum_steps", "eval_epochs"), at_least=1)
        shares = ("drop_path", "model_ema_decay", "momentum", "opt_betas")
        check_range(self, shares, at_least=0, at_most=1)
        check_range(self, ("weight_decay", "warmup_lr", "min_lr", "opt_eps"), at_least=0)
        check_range(self, ("clip_grad",), above=0)

    @property
    def learning_rate(self) -> float:
        """The peak learning rate that is really used."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Recipe(Augmentation, Optimization):
    """How a model is trained, whatever its width. Names and meanings are timm's."""

    lr: float | None = None
    """peak learning rate; by default lr-base x batch-size / lr-base-size"""
    lr_base: float = 5e-4
    """learning rate at a batch of lr-base-size"""
    lr_base_size: int = 512
    """batch size that lr-base is for"""
    filter_bias_and_bn: bool = True
    """no weight decay on norms and biases (tokens and position embeddings never have it)"""
    sched: Literal["cosine", "poly", "step", "tanh"] = "cosine"
    """schedule of the learning rate, stepped every update"""
    warmup_epochs: float = 5.0
    """epochs of linear warm-up"""
    decay_epochs: float = 30.0
    """sched step: epochs between decays"""
    decay_rate: float = 0.1
    """sched step: factor of a decay; sched poly: its power"""
    smoothing: float = 0.1
    """label smoothing"""
    drop: float = 0.0
    """dropout rate"""
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

    def __post_init__(self) -> None:
        Optimization.__post_init__(self)
        check_range(self, _COUNTS, at_least=1)
        check_range(self, _SHARES, at_least=0, at_most=1)
        check_range(self, ("scale", "crop_pct"), above=0, at_most=1)
        check_range(self, _AMOUNTS, at_least=0)
        check_range(self, _SIZES, above=0)
        for name in ("scale", "aspect_ratio"):
            if (pair := getattr(self, name)) is not None and pair[0] > pair[1]:
                raise RecipeError(f"{name} is {pair}", "Give the smaller number first.")
        if self.distillation != "none" and self.teacher is None:
            raise RecipeError("distillation needs a teacher", "Give --teacher, or no distillation.")
        if (self.mean is None) != (self.std is None):
            raise RecipeError("of mean and std only one is given", "Give both, or neither.")

    @property
    def learning_rate(self) -> float:
        """The peak learning rate that is really used."""
        return self.lr or self.lr_base * self.batch_size / self.lr_base_size


_PLACE = files("rbdc.settings") / "recipes"


def shipped_recipes(place: Traversable = _PLACE) -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(
        path.name.removesuffix(".yaml") for path in place.iterdir() if path.name.endswith(".yaml")
    )


def read_recipe(name: str) -> dict[str, Any]:
    """The settings in a shipped recipe of `rbdc train`, or in a YAML file."""
    return read_settings(name, _PLACE)


def read_settings(name: str, place: Traversable) -> dict[str, Any]:
    """The settings in a recipe shipped at `place` or a YAML file, names with underscores."""
    known = shipped_recipes(place)
    if name in known:
        text = (place / f"{name}.yaml").read_text()
    elif Path(name).suffix in (".yaml", ".yml"):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name} cannot be read: {error}", "Name a YAML file.") from None
    else:
        raise RecipeError(
            f"no recipe is called {name!r}",
            nearest(name, known) or f"Known are {', '.join(known)}, and YAML files.",
        )
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a ValueError
        raise RecipeError(f"{name} is not YAML: {error}", "Mend the file.") from None
    content = {} if content is None else content  # an empty file
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"{name} holds no settings", "Write a line a setting: lr: 0.001")
    settings = {key.replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise RecipeError(f"{name} has a setting twice, with - and with _", "Leave one out.")
    return settings


def check_names(settings: Mapping[str, Any], known: list[str]) -> None:
    for name in settings:
        if name not in known:
            raise RecipeError(
                f"no setting is called {name!r}",
                nearest(name, known) or f"Known are {', '.join(known)}.",
            )


def settle_types(settings: Any) -> None:
    """Make every field of a settings dataclass what it is declared to be, or say why it cannot be.

    YAML's lists become tuples and whole numbers floats where floats are meant, so that settings
    that mean the same are the same, wherever they come from.
    """
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, _settled(value, hint))
        except (TypeError, OverflowError):
            raise RecipeError(
                f"{name} is {value!r}, expected {describe_type(hint)}", _remedy(value, hint)
            ) from None


def _settled(value: Any, hint: Any) -> Any:
    """`value` as `hint` declares it; a TypeError if it is something else."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for one in inner:
            with suppress(TypeError):
                return _settled(value, one)
    elif origin is Literal:
        if value in inner:
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            hints = inner[:1] * len(value) if inner[1:] == (...,) else inner
            if len(value) == len(hints):
                return tuple(map(_settled, value, hints))
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            return float(value)
    elif isinstance(value, origin or hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise TypeError


def _remedy(value: Any, hint: Any) -> str:
    if isinstance(value, str):
        with suppress(ValueError):
            float(value)
            return "Numbers are written 0.001 or 1.0e-3: YAML reads 1e-3 as text."
        if close := nearest(value, map(str, _choices(hint))):
            return close
    return "Give it such a value."


def _choices(hint: Any) -> list[Any]:
    """Every value that a Literal somewhere in `hint` names."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for inner in get_args(hint) for choice in _choices(inner)]


def describe_type(hint: Any) -> str:
    """'a number or nothing', for messages."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(one) for one in inner)
    if origin is tuple:
        length = "" if inner[1:] == (...,) else f"{len(inner)} of "
        return f"a list: {length}{describe_type(inner[0])}"
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    return "nothing" if hint is type(None) else names.get(hint, "names with values")


def check_range(
    settings: Any,
    names: Iterable[str],
    *,
    at_least: float = -inf,
    above: float = -inf,
    at_most: float = inf,
) -> None:
    """Numbers, lists of numbers, or nothing, each within the limits."""
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if not (at_least <= number <= at_most and number > above):
                limits = (("at least", at_least), ("more than", above), ("at most", at_most))
                said = " and ".join(f"{word} {x:g}" for word, x in limits if isfinite(x))
                raise RecipeError(f"{name} is {number:g}, expected {said}", "Change it.")


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
