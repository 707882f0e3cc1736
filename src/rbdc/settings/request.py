"""What a run trains: model, data, how much to spend, and how models are coupled."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from rbdc.errors import RecipeError
from rbdc.settings.cluster import Cluster
from rbdc.settings.machine import Machine
from rbdc.settings.recipe import Recipe
from rbdc.settings.schema import (
    Count,
    Epochs,
    Positive,
    PositiveShare,
    Records,
    Settings,
    Several,
    schemas,
    settings,
    unknown_setting,
)

Axis = Literal["width", "depth", "resolution"]


@settings
class StageSettings(Settings):
    """One stage of a plan that a recipe file gives in full, instead of steps and grow."""

    width: PositiveShare = 1.0
    """width of its models, relative to the target's: 1, 0.5, 0.25, ..."""
    depth: Count | Several[Count] | None = None
    """blocks of its models, one number, or one for each stage of the architecture; by default the
    target's"""
    img_size: Count | None = None
    """side of its images in pixels; by default the target's"""
    sequence_length: Count | None = None
    """tokens per sequence, for language models; by default the target's"""
    share: PositiveShare | None = None
    """share of the plan's FLOPs; by default epochs follow from the ratio. Give all or none."""


@settings
class Request(Settings):
    """Everything but the recipe that decides the result of a run."""

    model: str | None = None
    """timm name of the target, the wide model"""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """timm arguments of the full-width model, such as depth=6 embed_dim=64"""
    width: float = 1.0
    """width of the target, relative to the named model"""
    img_size: Count | None = None
    """image side in pixels; by default the model's own, or the data's if it is in memory and not
    resized (scale null)"""
    data: str = "embedded"
    """folder, hf:NAME, cifar10, cifar100, fashion-mnist or embedded; for language models text files
    or token files"""
    tokenizer: str | None = None
    """language models: characters, bpe:N or the path of a tokenizer.json; by default characters"""
    data_dir: str = "~/.cache/rbdc"
    """folder that named data sets are stored in"""
    data_download: bool = False
    """download a named data set that is not there yet"""
    in_memory: bool = False
    """decode a folder of small images once and hold it in memory"""
    skip_bad: bool = False
    """leave out images that cannot be decoded, instead of refusing the data"""
    steps: int | Literal["auto"] = 1
    """recursive halvings; 0: standard training, auto: the fewest hours"""
    grow: Several[Literal["width", "depth", "resolution", "auto"]] = ("width",)
    """what grows: width, depth, resolution; auto: the family's"""
    narrow_size: PositiveShare = 0.8
    """image side (or tokens) of a stage divided by the next one's, where it grows"""
    stages: Records = ()
    """every stage in full, the first one first, instead of steps and grow: [{width: 0.5, depth: 6,
    img_size: 160, share: 0.3}, {share: 0.7}]"""
    ratio: float = 2.0
    """epochs of a wide model divided by the epochs of each of its parents"""
    budget: float | None = None
    """training FLOPs of all models, relative to standard training"""
    total_flops: float | None = None
    """training FLOPs of all models"""
    epochs: float | None = None
    """epochs of the target"""
    total_epochs: float | None = None
    """epochs of all models together: passes over the data"""
    budget_hours: float | None = None
    """hours of all models on one device, at measured or given speeds"""
    budget_time: float | None = None
    """hours of all models, relative to standard training's at the same speeds"""
    baseline_epochs: float | None = None
    """epochs of standard training, which budgets are relative to; by default 300 for ViTs and 90
    for ResNets"""
    schedule: Literal["appendix", "algorithm-1"] = "appendix"
    """how epochs are split across levels: as in the paper's appendix or its Algorithm 1"""
    costs: Literal["exact", "quarter"] = "exact"
    """cost model used to solve for epochs; quarter: half the width costs a quarter"""
    counter: Literal["fvcore", "fvcore+sdpa", "torch"] = "fvcore+sdpa"
    """which FLOP counter to use; fvcore is the paper's and leaves attention out"""
    rounding: Literal["whole", "none"] = "whole"
    """round the epochs of each level to whole numbers, or not"""
    # `rbdc plan` and `rbdc train` round, as the paper's plans do: evaluations follow whole epochs,
    # and the plan prints what rounding costs in FLOPs. `rbdc compare` has no such option and never
    # rounds (growth/rbdc.py): its protocols must cost exactly the same FLOPs.
    seed: int = 0
    """seed of everything random in the run"""
    transition: Several[Literal["restart", "carry"]] = ("carry",)
    """carry the optimizer's state over at a coupling, or restart as the paper does; or one name per
    level, leaves first"""
    carry_warmup_epochs: Epochs = 1.0
    """warm-up after a coupling that carries, in epochs or with a unit: '500 steps', '10%'"""
    batches: Literal["shared", "separate"] = "shared"
    """batches of the models of one level: shared, so that each image is decoded once for all of
    them, or separate, in an order of its own for each model"""
    fuse: Literal["auto", "on", "off"] = "auto"
    """train the models of a level as one model with batched weights: where that is measured to be
    faster, always, or never"""
    narrow_lr: Positive = 1.0
    """learning rate of a model divided by that of the model of twice its width"""
    with_baseline: bool = False
    """also train the target the standard way"""
    baseline_budget: Positive | None = None
    """FLOPs of that standard training, relative to baseline-epochs; by default those of the tree"""
    allow_inexact: bool = False
    """allow architectures that can only be coupled approximately"""

    def __post_init__(self) -> None:
        """Refuse repeated names, and a seed that torch cannot take."""
        alone = "auto" not in self.grow or len(self.grow) == 1
        if not self.grow or len({*self.grow}) < len(self.grow) or not alone:
            raise RecipeError(
                f"grow is {', '.join(self.grow) or 'empty'}",
                "Name one or more of width, depth and resolution, each once; or auto.",
            )
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed is {self.seed}", "Use a whole number from 0 to 2**63 - 1.")


SPEND = ("budget", "total_flops", "epochs", "total_epochs", "budget_hours", "budget_time")
"""The ways to say how much to spend; a run takes exactly one."""
_RELATIVE = ("budget", "budget_time", "baseline_epochs", "with_baseline")
GROWTH = ("grow", "narrow_size", "stages")
"""The settings that say what grows from stage to stage."""
PLAN = ("steps", "ratio", *SPEND, "baseline_epochs", "schedule", "costs", "counter", "rounding",
        "batches")  # fmt: skip
"""The other settings that a plan is made from."""


def names_baseline(request: Mapping[str, Any]) -> bool:
    """Return whether a request (as JSON) names standard training: to be relative to, or to run."""
    return any(request.get(name) not in (None, False) for name in _RELATIVE)


def split_settings(
    file: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> tuple[Request, Recipe]:
    """Return a request and a recipe, from a recipe file's settings and those that override it.

    If another model is given, the file's model arguments do not apply to it. If an amount to spend
    is given, it replaces the file's, in whatever way the file gives it.
    """
    given = given or {}
    replaced = {"model_kwargs"} if "model" in given else set()
    if any(name in given for name in SPEND):
        replaced |= {*SPEND}
    base = {name: value for name, value in file.items() if name not in replaced}
    merged = {**base, **given}
    of_request, of_recipe = schemas(Request), schemas(Recipe)
    for name in merged:
        if name not in {**of_request, **of_recipe}:
            raise _setting_of_another(name) or unknown_setting(name, [*of_request, *of_recipe])
    request = {name: merged[name] for name in of_request if name in merged}
    recipe = {name: merged[name] for name in of_recipe if name in merged}
    return Request(**request), Recipe(**recipe)


def _setting_of_another(name: str) -> RecipeError | None:
    """Return the mistake of giving a setting of the machine or the cluster with the training's."""
    for cls in (Machine, Cluster):
        if name in schemas(cls):
            option, argument = name.replace("_", "-"), cls.__name__.lower()
            value = f"{argument}=rbdc.{cls.__name__}({name}=...)"
            return RecipeError(
                f"{name} is a setting of the {argument}, not of what is trained",
                f"Give --{option} on the command line, or {value} in Python.",
            )
    return None
